"""What pyproject.toml cannot say: a wheel holds compiled kernels, so it is for one platform, yet for any Python 3."""

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel


class PlatformDistribution(Distribution):
    """A distribution with compiled parts, although none of them is an extension module."""

    def has_ext_modules(self) -> bool:
        """Makes the wheel specific to the platform."""
        return True


class AnyPythonWheel(bdist_wheel):
    """The kernels are loaded with ctypes and know no Python ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        """The platform's tag without the interpreter's."""
        return "py3", "none", super().get_tag()[2]


setup(distclass=PlatformDistribution, cmdclass={"bdist_wheel": AnyPythonWheel})
