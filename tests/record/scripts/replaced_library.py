"""Replaces functions of the standard library by ones that fail, twice, and shows their calls."""

import sys
from unittest import mock

from tiny import STEPS, Trainer, say

NAMES = """
atexit.register builtins.open builtins.print copy.deepcopy faulthandler.cancel_dump_traceback_later
gc.collect gc.get_objects gzip.open hashlib.sha256 inspect.signature io.open json.dumps json.loads os.access os.close os.dup
os.fdopen os.fstat os.getcwd os.listdir os.mkdir os.open os.path.exists os.path.isfile os.replace
os.scandir os.stat os.statvfs os.unlink pathlib.Path.exists pathlib.Path.glob pathlib.Path.mkdir
pathlib.Path.open pathlib.Path.stat pathlib.Path.unlink pathlib.PurePath.__str__
pathlib.PurePath.__truediv__ pickle.dumps pickle.loads platform.machine platform.system
shutil.copyfileobj shutil.disk_usage shutil.rmtree signal.setitimer signal.signal subprocess.Popen
tempfile.NamedTemporaryFile tempfile.TemporaryFile tempfile.gettempdir tempfile.mkdtemp
threading.Event threading.Thread threading.enumerate time.monotonic time.perf_counter
time.process_time time.sleep time.strftime time.time traceback.walk_stack
""".split()
called = set()
trainer = Trainer()
say(trainer.step())
for for_good in (False, True):
    made = [mock.patch(name, lambda *_, n=name, **__: called.add(n) or 1 / 0) for name in NAMES]
    for one in made:
        one.start()
    for _ in range(STEPS // 2):
        trainer.step()
    for one in () if for_good else made:
        one.stop()
    sys.stdout.write(f"{called} {trainer.step().hex()}\n")
