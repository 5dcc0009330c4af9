"""Replaces functions of the standard library by ones that raise, and counts the calls: in some
steps, and at last for good.
"""

import importlib

from tiny import STEPS, Trainer, say

NAMES = """
atexit.register builtins.open builtins.print faulthandler.cancel_dump_traceback_later gc.collect
gc.get_objects gzip.open inspect.signature io.open json.dumps json.loads os.access os.close os.dup
os.fdopen os.fstat os.getcwd os.listdir os.mkdir os.open os.path.exists os.path.isfile os.replace
os.scandir os.stat os.statvfs os.unlink pathlib.Path.exists pathlib.Path.glob pathlib.Path.mkdir
pathlib.Path.open pathlib.Path.stat pathlib.Path.unlink platform.machine platform.system
shutil.copyfileobj shutil.disk_usage shutil.rmtree signal.setitimer signal.signal
subprocess.Popen tempfile.NamedTemporaryFile tempfile.TemporaryFile tempfile.gettempdir
tempfile.mkdtemp threading.Event threading.Thread threading.enumerate time.monotonic
time.perf_counter time.process_time time.sleep time.strftime time.time traceback.walk_stack
""".split()
calls = []


def replace(name):
    owner, _, attribute = name.rpartition(".")
    place = importlib.import_module(owner.removesuffix(".Path"))
    place = place.Path if owner.endswith(".Path") else place
    real = getattr(place, attribute)

    def fails(*_, **__):
        calls.append(name)
        raise LookupError(name)

    setattr(place, attribute, fails)
    return lambda: setattr(place, attribute, real)


trainer = Trainer()
say(trainer.step())
undo = [replace(name) for name in NAMES]
for number in range(STEPS // 2):
    trainer.step()
for one in undo:
    one()
say(*sorted(set(calls)), trainer.step())
for name in NAMES:
    if name != "builtins.print":
        replace(name)
for number in range(STEPS // 2):
    say(number, trainer.step())
say(len(calls))
