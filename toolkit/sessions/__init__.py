"""What a person asks for, from recipe to result: resolve, start, resume, compare, scale, verify.

Used by the commands and by `toolkit.api` alike. May import every package but `commands`; the runtime only inside
functions, so that planning never loads torch.
"""
