"""`make setup`: make .venv and install the course into it, with all that its tests need.

The versions are the tested ones, which constraints.txt lists. With --oldest (for `make oldest`), .venv-oldest
gets the lowest versions that pyproject.toml allows; with --newest (for `make newest`), .venv-newest gets the
newest that the package index has.
Standard library and Python 3.6 syntax only, so that an old Python can be told that it is too old.
A stamp is written into .venv at the very end. While it fits pyproject.toml, constraints.txt and this file,
nothing is installed. Without it (on the first run, or after one that failed or was interrupted), every step
is taken, and what is there is kept: the half of an interrupted run, a torch that was put into .venv before.
"""
# ruff: noqa: UP021, UP032  (Python 3.6 has no `text=`)

import glob
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OLDEST, NEWEST = "--oldest" in sys.argv[1:], "--newest" in sys.argv[1:]
NAME = ".venv-oldest" if OLDEST else ".venv-newest" if NEWEST else ".venv"
TESTED = os.path.join(ROOT, "constraints.txt")
VENV = os.path.join(ROOT, NAME)
PROGRAMS = os.path.join(VENV, "Scripts" if os.name == "nt" else "bin")
PYTHON = os.path.join(PROGRAMS, "python.exe" if os.name == "nt" else "python")
STAMP = os.path.join(VENV, "course-setup-done")
LOG = os.path.join(VENV, "course-setup.log")
DOWNLOADS = os.path.join(VENV, "course-setup-downloads")  # pip's temporary files, where we can clear them
CONSTRAINTS = os.path.join(DOWNLOADS, "constraints.txt")  # for this set-up

# GB that stay in .venv, and GB that downloads take besides while pip installs
WITH_CUDA, WITHOUT_CUDA, TORCH_IS_THERE = (6.6, 2.8), (1.7, 0.5), (0.9, 0.3)

NO_VENV = re.compile(r"ensurepip\s+is\s+not\s+available|No module named '?(venv|ensurepip)")
DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded|not enough space on the disk")
NO_NETWORK = re.compile(
    r"NewConnectionError|ConnectTimeout|ReadTimeout|Read timed out|Max retries exceeded|ProxyError|SSLError"
    r"|Connection (refused|reset|aborted)|Network is unreachable|Temporary failure in name resolution"
    r"|Name or service not known|getaddrinfo failed|nodename nor servname"
)

# For this .venv only: JupyterLab neither asks about news nor looks for a newer version
LAB_SETTINGS = os.path.join(VENV, "share", "jupyter", "lab", "settings", "overrides.json")
NO_NEWS = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}}
# nbgitpuller (for `make update`) adds a page that lets a link copy a stranger's files into the course
SERVER_SETTINGS = os.path.join(VENV, "etc", "jupyter", "jupyter_server_config.json")
NO_PULLING_BY_LINK = {"ServerApp": {"jpserver_extensions": {"nbgitpuller": False}}}


class Fault(Exception):
    """Why the set-up stops: what went wrong and what to do, in one sentence."""


def set_up():
    if is_done():
        return
    wait_for_another_set_up()
    if is_done():
        return
    follow_a_move()
    check_the_version()
    pip_options = check_the_space()
    if not has_pip():
        make_venv()
    forget_half_installed()
    install(pip_options)
    check_the_torch_pair()
    write(LAB_SETTINGS, json.dumps(NO_NEWS, indent=2))
    write(SERVER_SETTINGS, json.dumps(NO_PULLING_BY_LINK, indent=2))
    write(STAMP, wanted())
    print(f"Set-up done: the course is in {NAME}.")


def keep_compiled():
    """Compile the course's modules: with PYTHONDONTWRITEBYTECODE set, each rank would compile its imports."""
    folders = [os.path.join(ROOT, *each) for each in (["course_lib"], ["tests"], ["lessons", "scripts"])]
    there = list(filter(os.path.isdir, folders))
    if there:  # without a folder, compileall compiles all of sys.path
        subprocess.call([PYTHON, "-m", "compileall", "-qq", *there])


def wanted():
    """Return the stamp of an up-to-date .venv: the course's folder and a digest of what it requires."""
    tables = re.findall(r"(?ms)^\[.*?(?=^\[|\Z)", read(os.path.join(ROOT, "pyproject.toml")))
    asked = [table for table in tables if re.match(r"\[(build-system|project|tool\.setuptools)\b", table)]
    asked = re.sub(r"(?m)\s*#.*$|\s+$", "", "".join(asked)) + read(os.path.abspath(__file__)) + tested()
    return "{}\n{}\n".format(ROOT, hashlib.sha256(asked.encode("utf-8")).hexdigest())


def stamp():
    try:
        return read(STAMP)
    except OSError:
        return ""


def is_done():
    """Return whether nothing is left to do; never so with --newest, as only the index knows."""
    return not NEWEST and stamp() == wanted() and os.path.exists(PYTHON)


def wait_for_another_set_up():
    """Wait while another set-up runs, as two would break .venv; the lock ends with its process."""
    if fcntl is None:
        return
    folder = os.open(ROOT, os.O_RDONLY)
    os.set_inheritable(folder, True)  # pip inherits the lock: it may outlive a set-up that was killed
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("Another set-up is at work in this folder: waiting for it.", flush=True)
        fcntl.flock(folder, fcntl.LOCK_EX)


def follow_a_move():
    """Correct the path in .venv's programs after the course was moved or copied."""
    old = os.path.join((stamp().splitlines() or [ROOT])[0], NAME)
    if old == VENV:
        return
    old, new = os.fsencode(old), os.fsencode(VENV)
    for path in glob.glob(os.path.join(glob.escape(PROGRAMS), "*")):
        if os.path.isfile(path) and not os.path.islink(path) and os.path.getsize(path) < 1e6:
            with open(path, "rb+") as file:
                content = file.read()
                if b"\0" not in content and old in content:
                    file.seek(0)
                    file.write(content.replace(old, new))
                    file.truncate()


def check_the_version():
    project = read(os.path.join(ROOT, "pyproject.toml"))
    oldest = tuple(int(part) for part in re.search(r'requires-python = ">=(\d+)\.(\d+)"', project).groups())
    needed = "the course needs {}.{} or newer".format(*oldest)
    found = venv_version()
    if found is None and sys.version_info[:2] < oldest:
        this = ".".join(str(part) for part in sys.version_info[:3])
        raise Fault(f"this is Python {this} and {needed}: name one, as in `PYTHON=python3.12 make setup`.")
    if found is not None and found < oldest:
        raise Fault(
            f"{NAME} holds Python {found[0]}.{found[1]} and {needed}: remove the folder {NAME} and name"
            " a newer Python, as in `PYTHON=python3.12 make setup`."
        )


def venv_version():
    """Return the version of .venv's Python as (3, 12), or None if it does not work."""
    run = in_venv("print(*sys.version_info[:2])")
    return tuple(int(part) for part in run.stdout.split()[-2:]) if run.returncode == 0 else None


def has_pip():
    return in_venv("import pip").returncode == 0


def in_venv(code):
    """Run code in .venv's Python; fail if a half-made .venv leads to the machine's own Python instead."""
    is_ours = f"import os, sys; os.path.samefile(sys.prefix, {VENV!r}) or sys.exit('not a venv'); "
    return output_of([PYTHON, "-c", is_ours + code])


def check_the_space():
    """Raise if the disk is too full; return pip options that save space if it is nearly so."""
    there = installed("torch")
    if there:
        staying, downloads = TORCH_IS_THERE
    else:
        staying, downloads = WITH_CUDA if sys.platform.startswith("linux") else WITHOUT_CUDA
        staying = max(staying - size_of(VENV) / 1e9, 0.5)
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < staying + downloads:
        smaller = f", or put PyTorch's smaller CPU build into {NAME} first, as the README says"
        raise Fault(
            f"the disk is too full: making {NAME} takes about {staying + downloads:.1f} GB, of which"
            f" {staying:.1f} GB stay, and {free:.1f} GB are free: make room{'' if there else smaller}."
        )
    return [] if free > staying + 2 * downloads else ["--no-cache-dir"]


def size_of(folder):
    files = (os.path.join(top, name) for top, _, names in os.walk(folder) for name in names)
    return sum(os.lstat(path).st_size for path in files)


def installed(name):
    """Return the ``.dist-info`` folders in .venv of a package; none if it is not installed."""
    folders = [os.path.join(glob.escape(VENV), lib, "site-packages") for lib in ("lib/python3*", "Lib")]
    return [path for folder in folders for path in glob.glob(os.path.join(folder, name + "-*.dist-info"))]


def make_venv():
    """Make .venv, or add pip to one that lacks it; clear what is in it only if nothing else helps."""
    make = [sys.executable, "-m", "venv", VENV]
    attempts = [make, [*make, "--clear"]]
    if venv_version() is not None:
        attempts.insert(0, [PYTHON, "-m", "ensurepip"])
    for command in attempts:
        run = output_of(command)
        if run.returncode == 0 and has_pip():
            return
        check_for_full_disk(run.stdout)
        if "venv" in command and NO_VENV.search(run.stdout):
            named = re.search(r"apt install (\S+)", run.stdout)
            package = named.group(1) if named else "python{}.{}-venv".format(*sys.version_info[:2])
            raise Fault(
                "this Python cannot make virtual environments: on Debian and Ubuntu,"
                f" `sudo apt install {package}`, then run the same command again."
            )
    raise Fault(f"`{sys.executable} -m venv {NAME}` failed: {last_line(run.stdout)}")


def forget_half_installed():
    """Delete the ``.dist-info`` of half-installed packages, which lack INSTALLER or RECORD (written last)."""
    shutil.rmtree(DOWNLOADS, ignore_errors=True)
    for package in installed("*"):
        if not all(os.path.exists(os.path.join(package, name)) for name in ("INSTALLER", "RECORD")):
            shutil.rmtree(package)


def install(options):
    if not installed("torch"):
        print(f"Making {NAME}: this downloads PyTorch and takes some minutes.", flush=True)
    if OLDEST:
        options = [*options, "--only-binary", ":all:"]  # what a learner would have to build is not supported
    if NEWEST:
        options = [*options, "--upgrade", "--upgrade-strategy", "eager"]
    lines = lowest_versions() if OLDEST else "" if NEWEST else without_another_torch(tested())
    try:
        told = pip_install(options, lines)
        for _ in range(lines.count("\n")):
            if told is None or OLDEST or NO_NETWORK.search(told + read(LOG)):
                break
            lines = without_what_is_in_the_way(lines)
            if lines is None:
                break
            told = pip_install(options, lines)
    finally:
        shutil.rmtree(DOWNLOADS, ignore_errors=True)
    if told is None:
        return
    check_for_full_disk(told)
    errors = re.findall(r"(?m)^\s*ERROR: (?!Exception:|ResolutionImpossible)(.*)$", told)
    error = errors[-1] if errors else last_line(told)
    error += " (all that pip said: {}/{})".format(NAME, os.path.basename(LOG))
    if NO_NETWORK.search(told + read(LOG)):
        raise Fault(f"pip could not reach the package index, is there a network? Its last line: {error}")
    if "No matching distribution" in error:
        version = "{}.{}".format(*venv_version())
        raise Fault(f"pip finds no package that fits Python {version} on this machine: {error}")
    raise Fault(f"pip failed: {error}")


def pip_install(options, lines):
    """Install the course under constraints; return None if that went well, else pip's complaints."""
    write(CONSTRAINTS, lines)
    write(LOG, "")
    pip = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--log", LOG]
    with subprocess.Popen(
        [*pip, *options, "--constraint", CONSTRAINTS, "-e", ".[lab,albert,test,site]"],
        cwd=ROOT,
        env=dict(os.environ, TMPDIR=DOWNLOADS, TEMP=DOWNLOADS, PIP_USER="0", PIP_REQUIRE_VIRTUALENV="1"),
        stderr=subprocess.PIPE,  # pip's progress is shown, its complaints become one sentence
        universal_newlines=True,
        errors="replace",
        close_fds=False,
    ) as process:
        told = process.stderr.read()
    return told if process.returncode else None


def tested():
    """Return constraints.txt, one version a line, some for one platform or Python only; or "" if unused."""
    return read(TESTED) if not (OLDEST or NEWEST) and os.path.exists(TESTED) else ""


def name_of(line):
    """Return the package that a line of constraints is about, as pip spells it; "" for a comment."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]*", line).group()).lower()


def pinned(line):
    """Return the name and version in a line of constraints, for people to read."""
    return line.partition(";")[0].strip().replace("==", " ")


def without_another_torch(lines):
    """Return constraints that keep an installed torch, if new enough, and the packages built for it."""
    for path in installed("torch"):
        version = os.path.basename(path)[len("torch-") : -len(".dist-info")]
        if numbers(version) >= numbers(dict(bounds())["torch"]):
            if "torch==" + version.partition("+")[0] not in lines.splitlines():
                lines = without_torchs_own(lines)
            kept = [line for line in lines.splitlines() if name_of(line) != "torch"]
            return "\n".join([*kept, "torch==" + version, ""])
    return lines


def without_torchs_own(lines):
    """Return constraints without the packages that each torch needs in versions of its own."""
    own = re.compile(r"torchvision$|triton$|cuda-|nvidia-(?!ml-py)")
    return "\n".join(line for line in lines.splitlines() if not own.match(name_of(line)))


def without_what_is_in_the_way(lines):
    """Return constraints that relax the versions which pip could not install; None if it named none.

    If the index has dropped a version, or the user's pip settings exclude it, the nearest one that the index
    has replaces it. If a version is there but does not fit the others, its constraint is dropped.
    """
    told = re.sub(r"(?m)^\d\S+ ", "", read(LOG))  # without the time at the start of each line
    named = re.findall(r"(?m)^ +The user requested \(constraint\) ([\w.-]+)", told)
    named += re.findall(r"satisfies the requirement ([\w.-]+)", told)
    named += re.findall(r"(?m)^ +([\w.-]+) \S+ depends on ", told)
    in_the_way = [
        line for line in lines.splitlines() if "==" in line and name_of(line) in map(name_of, named)
    ]
    gone = {}
    for line in in_the_way:
        version = re.search(r"==([^\s;]+)", line).group(1)
        nearest = nearest_version(name_of(line), version)
        if nearest not in (None, version):
            gone[line] = line.replace("==" + version, "==" + nearest, 1)
            print(f"{pinned(line)} was tested, but the package index does not have it: {nearest} instead.")
    if not gone:
        for line in in_the_way:
            print(f"{pinned(line)} was tested, but does not fit here: another version instead.")
    if any(name_of(line) == "torch" for line in gone or in_the_way):
        lines = without_torchs_own(lines)
    kept = [gone.get(line, line) for line in lines.splitlines() if gone or line not in in_the_way]
    return "\n".join([*kept, ""]) if in_the_way else None


def nearest_version(name, version):
    """Return this version, or the next older, or else newer, one that the index has and the course allows."""
    pip = [PYTHON, "-m", "pip", "install", "--dry-run", "--no-deps", "--no-user"]
    listed = re.search(r"\(from versions: ([^)]*)\)", output_of([*pip, name + "==0.0.0.dev0"]).stdout)
    there = listed.group(1).split(", ") if listed else []
    there = [each for each in there if re.match(r"[\d.]+(\.post\d+)?$", each)]  # no pre-releases
    lowest = dict(bounds()).get(name, "0")
    there = [each for each in there if numbers(each) >= numbers(lowest)]
    if version in there or not there:
        return version if there else None
    older = [each for each in there if numbers(each) < numbers(version)]
    return max(older, key=numbers) if older else min(there, key=numbers)


def lowest_versions():
    """Return constraints for the lowest version of each package that pyproject.toml names."""
    return "".join("{}=={}\n".format(*bound) for bound in bounds())


def bounds():
    """Return each package that pyproject.toml names, with the lowest version that it allows."""
    return re.findall(r'(?m)^ +"([\w-]+)>=([\d.]+)', read(os.path.join(ROOT, "pyproject.toml")))


def numbers(version):
    return [int(part) for part in re.match(r"[\d.]*\d", version).group().split(".")]


def check_for_full_disk(told):
    if DISK_FULL.search(told):
        raise Fault("the disk is full: make room, then run the same command again and it goes on.")


def check_the_torch_pair():
    """Raise if torch and torchvision were not built for each other: then torch imports, torchvision fails."""
    run = in_venv(
        "import torch, torchvision.ops; torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)"
    )
    if run.returncode == 0:
        return
    pair = installed("torch") + installed("torchvision")
    names = " and ".join(os.path.basename(path)[: -len(".dist-info")].replace("-", " ") for path in pair)
    raise Fault(
        f"{names} do not work together ({last_line(run.stdout)}): `{NAME}/bin/python -m pip uninstall -y"
        " torch torchvision`, then take both from one place, by `make setup` or as the README says."
    )


def output_of(command):
    """Run a command to its end, with stderr in stdout; a missing program gives exit code 127."""
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        return subprocess.run(command, cwd=ROOT, universal_newlines=True, errors="replace", **both)
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, stdout=str(error))


def last_line(text):
    return (text.strip().splitlines() or ["it said nothing"])[-1].strip()


def read(path):
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(path + ".new", path)


def main():
    try:
        set_up()
        keep_compiled()
    except Fault as fault:
        print(f"Set-up stopped: {fault}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"Set-up stopped: {error}; fix that, then run the same command again.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nSet-up interrupted: run the same command again and it goes on.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
