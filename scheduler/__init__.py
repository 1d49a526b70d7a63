"""What moves when: layout algebra, the plan, the pure state machine, the byte budget and its asyncio driver.

Imports neither torch nor any framework. `layout`, `plan`, `programs`, `events`, `machine` and `budget` are
pure: no asyncio, no clock, no I/O.
"""
