"""First import of the server that warm workers are forked from: turns the garbage collector off for those that follow.

Imports make next to no garbage, and looking for it takes a fifth of the server's start. `warm_pool` turns the collector
on again in each worker.
"""

import gc

gc.disable()
