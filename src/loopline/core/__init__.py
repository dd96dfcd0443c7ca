"""What a run is: events, listeners, the plan, progress. Standard library only; no torch."""
