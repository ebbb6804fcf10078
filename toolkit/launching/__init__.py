"""How processes are started: launchers, hostfiles, environment, launch files, stop signals, machine checks.

May import `errors`, `resources`, `recipe`, `clusters`, `plans` and `run_dir`. Never imports torch, and starts nothing.
"""
