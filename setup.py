"""Builds `vllm_uno/_C.abi3.so` through CMake where the tools for it are there.

The extension is an extra: without it (no CMake, no C++ compiler, no torch to build against, a
failed build) the package still installs and its PyTorch code does the same work. pip isolates
builds by default and hides torch that way, so the extension needs

    pip install --no-build-isolation .

`VLLM_UNO_BUILD_EXT=0` leaves it out, `=1` makes its absence an error; `VLLM_UNO_CUDA_ARCHS`
(CMake's syntax, such as `90-real`) picks the GPU architectures.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def which(*names: str) -> str | None:
    # pip run as `.venv/bin/python -m pip` has the venv's scripts (cmake, ninja) not on its PATH.
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])
    return next((found for name in names if (found := shutil.which(name, path=path))), None)


def reason_to_skip() -> str | None:
    if os.environ.get("VLLM_UNO_BUILD_EXT") == "0":
        return "VLLM_UNO_BUILD_EXT=0 is set"
    if importlib.util.find_spec("torch") is None:
        return (
            "torch is not importable in the build environment (pip's build isolation hides it: "
            "install torch first and pass --no-build-isolation)"
        )
    if which("cmake") is None:
        return "cmake was not found"
    if which(*os.environ.get("CXX", "c++ g++ clang++").split()) is None:
        return "no C++ compiler was found"
    return None


def go_without(reason: str) -> None:
    # What an earlier build left in the tree is not what these sources say.
    (ROOT / "vllm_uno" / "_C.abi3.so").unlink(missing_ok=True)
    if os.environ.get("VLLM_UNO_BUILD_EXT") == "1":
        sys.exit(f"vllm-uno: VLLM_UNO_BUILD_EXT=1 is set, but {reason}")
    print(
        f"vllm-uno: installing WITHOUT the compiled extension: {reason}. "
        "The plain PyTorch path is used in its place.",
        file=sys.stderr,
        flush=True,
    )


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        out = Path(self.get_ext_fullpath(ext.name)).resolve()
        # Auto: CUDA sources too where there is nvcc and torch is a CUDA build. Should they fail,
        # the CPU part alone is still worth having.
        for cuda in ("AUTO", "OFF"):
            try:
                self.build_with_cmake(out, cuda)
                return
            except (subprocess.CalledProcessError, OSError) as error:
                failure = f"the build failed ({error}; pip install -v shows its output)"
        go_without(failure)

    def build_with_cmake(self, out: Path, cuda: str) -> None:
        # A cache of another torch or compiler must not be reused; the whole build takes seconds.
        build = (Path(self.build_temp) / "cmake").resolve()
        shutil.rmtree(build, ignore_errors=True)
        cmake = which("cmake")
        assert cmake is not None
        configure = [
            *(cmake, "-S", str(ROOT), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release"),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={out.parent}",
            f"-DVLLM_UNO_OUTPUT_NAME={out.name}",
            f"-DVLLM_UNO_CUDA={cuda}",
        ]
        if ninja := which("ninja"):
            configure += ["-GNinja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        if archs := os.environ.get("VLLM_UNO_CUDA_ARCHS"):
            configure.append(f"-DCMAKE_CUDA_ARCHITECTURES={archs}")
        subprocess.run(configure, check=True)
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        subprocess.run([cmake, "--build", str(build), "-j", jobs], check=True)


class PlatformWheel(bdist_wheel):
    """The library speaks torch's stable ABI and not Python's: one wheel for every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


skip = reason_to_skip()
if skip and "egg_info" not in sys.argv and "dist_info" not in sys.argv and "sdist" not in sys.argv:
    go_without(skip)

extension = Extension(
    "vllm_uno._C",
    # Only for the list of files in the source distribution: CMakeLists.txt names what it builds.
    sources=["CMakeLists.txt", *(str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/**/*.*"))],
    py_limited_api=True,  # the file's name: _C.abi3.so
    optional=True,
)
setup(
    ext_modules=[extension] if skip is None or "sdist" in sys.argv else [],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": PlatformWheel},
)
