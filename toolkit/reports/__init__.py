"""What people look at: tables in the terminal, HTML pages, the loss curve of a notebook.

May import the pure packages, `launching` and `run_dir`, numpy; never the runtime or torch.
"""
