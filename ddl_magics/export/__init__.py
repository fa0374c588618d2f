"""A notebook's `%%ddl` cells as one script for torchrun, mpiexec or srun.

The cells' own code, comments and order are kept; imports go to the top, text becomes comments, and `ddl_magics.init`
stands where `%ddl start` stood. What no script can have is named, all of it at once. Limits: what Python's syntax
tells; a cell that reads what another left in a file, or in a library, is not seen to need it.
"""
