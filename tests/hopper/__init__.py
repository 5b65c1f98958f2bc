"""Kernels as Triton compiles them for Hopper, run on the CPU: an emulator of PTX that checks its memory.

Triton's interpreter runs the source of a kernel; what a GPU runs went through a compiler, which has faults
of its own. Here the compiled program runs, warp by warp. Addresses out of bounds and misaligned ones are
errors; warps take turns in several orders, and what runs beside them happens as early or as late as it may,
so that a missing barrier shows as a result that depends on the order. Not seen: what ptxas makes of PTX, the
order of additions inside a tensor core, and time.

    TRITON_INTERPRET=0 pytest tests/hopper
"""
