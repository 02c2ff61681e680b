"""A simulated cluster: the library's own code on simulated processes, clocks, networks and disks, all from one seed.

It is the method of FoundationDB and TigerBeetle. :mod:`scheduler` has processes whose threads are greenlets, and a
clock that stands still while code runs. :mod:`threads`, :mod:`sockets`, :mod:`system` and :mod:`processes` are what the
standard library's modules are to a process. :mod:`modules` gives them to the library's modules in place of the real
ones, for the time of a run. So the library pays nothing for it.
"""
