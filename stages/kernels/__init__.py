"""What `prepare` and `digest` do on a GPU: Triton kernels, and the plain torch that defines their results bit for bit.

::

    reference      the wire formats, bit for bit, in plain torch         from_plan   the plan's tasks as parts and landings
    plain          the same results faster, where kernels cannot run     assemble    write a bucket and its digest
    rounding       casts, scales and e4m3 codes, for kernels to call     land        take it apart and digest what landed
    tiles          kernels that copy, cast and quantize strided pieces   views       what is read and written, on the host
    xxh3           kernels for XXH3-128 of leaves beyond 240 bytes       tables      the tables that kernels work through
    xxh3_short     and of shorter ones                                   launches    launches, from tables
    mixing         constants and mixing steps of XXH3                    language    Triton, or what stands for it

Nothing here needs Triton or a GPU to be imported.
"""
