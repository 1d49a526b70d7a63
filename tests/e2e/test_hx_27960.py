import asyncio, pytest, time
CONFIG={"max_tmp_bytes": "256KiB", "bucket_bytes": "16KiB","push_timeout_s":20.0,"connect_timeout_s":20.0}
@pytest.mark.parametrize("n",[1,4,10])
@pytest.mark.parametrize("transport",["gloo","shm"])
async def test_push(cluster,n,transport):
    build={"model":{"kind":"stamp","width":64,"rows":128}}
    t=time.monotonic()
    source, *ts = await asyncio.gather(cluster.source(2, build={**build,"layout":"fsdp"}), *(cluster.target(f"a{i}",build={**build,"movable":True}) for i in range(n)))
    print(n, transport, "made", time.monotonic()-t); t=time.monotonic()
    await cluster.connect(source,ts,transport=transport,landing="staged",**CONFIG)
    print("connect", time.monotonic()-t); t=time.monotonic()
    await source.all("close"); 
    await cluster.connect(source,ts,transport=transport,landing="staged",**CONFIG)
    print("connect again", time.monotonic()-t)
