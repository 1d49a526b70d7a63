import time, asyncio
async def test_x(targets):
    target=await targets(version=1)
    for T in (30,0.6,5):
        t0=time.perf_counter()
        v=int(T*10)+2 if T!=0.6 else 1000
        v={30:2,0.6:3,5:4}[T]
        await target.source.prepare(v); target.deliver(v)
        t=asyncio.create_task(target.source.complete(v,timeout_s=T))
        await asyncio.sleep(0.3)
        print(T, target.leader._leader._machine.step, target.leader._rank.fence.story[-3:], target.leader._rank._update and target.leader._rank._update.receiving)
        r=await t
        print(T,r.success,r.message, time.perf_counter()-t0)
    assert 0
