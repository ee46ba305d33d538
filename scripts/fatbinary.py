#!/usr/bin/env python3
"""CUDA 13's fatbinary under clang-19, which spells its images as CUDA 12 and earlier did.

clang says --image=profile=sm_72,file=F (or --image3=kind=elf,sm=72,file=F in later versions);
CUDA 13 only takes the second form. FATBINARY names the program, by default
/usr/local/cuda/bin/fatbinary.
"""

import os
import re
import sys

IMAGE = re.compile(r"--?image3?=(?:kind=\w+,)?profile=(sm|compute)_(\w+),file=(.*)")
KINDS = {"sm": "elf", "compute": "ptx"}


def main() -> None:
    program = os.environ.get("FATBINARY", "/usr/local/cuda/bin/fatbinary")
    arguments = [program, "-compress=false"]
    for argument in sys.argv[1:]:
        image = IMAGE.match(argument)
        if image:
            kind, sm, file = image.groups()
            argument = "--image3=kind=%s,sm=%s,file=%s" % (KINDS[kind], sm, file)
        arguments.append(argument)
    os.execv(program, arguments)


if __name__ == "__main__":
    main()
