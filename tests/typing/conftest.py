"""The user_*.py files are read by a type checker; nothing of them is to be collected or run."""

collect_ignore_glob = ["user_*.py"]
