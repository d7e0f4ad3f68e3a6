"""The layouts that Python parses from abi.h equal those of a C compiler."""

import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from ebpfproxy.backends.ebpf import abi

SOURCE = abi.source_directory() / "abi.h"
PLAIN = re.sub(r"/\*.*?\*/", "", SOURCE.read_text(), flags=re.DOTALL)


def compiled(folder: Path, expressions: list[str]) -> list[int]:
    """The values of these constant expressions in C, with abi.h included."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler, "no C compiler here: make setup installs one"
    prints = "".join(f'\tprintf("%lld\\n", (long long)({each}));\n' for each in expressions)
    program = folder / "layouts.c"
    program.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n#include <linux/types.h>\n"
        f'#include "{SOURCE}"\nint main(void)\n{{\n{prints}\treturn 0;\n}}\n'
    )
    subprocess.run([compiler, "-Werror", "-o", folder / "layouts", program], check=True)
    done = subprocess.run([folder / "layouts"], capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.split()]


def test_every_struct_and_enumerator_of_the_header_is_read() -> None:
    """This test uses another pattern than the parser, since nothing else finds what the parser skips."""
    assert set(abi.LAYOUTS) == set(re.findall(r"\bstruct (\w+)\s*{", PLAIN))
    enums = re.findall(r"\benum \w+\s*{([^}]*)}", PLAIN)
    assert enums
    names = {part.split("=")[0].strip() for body in enums for part in body.split(",") if part.strip()}
    assert set(abi.CONSTANTS) == names | set(re.findall(r"#define\s+(\w+)", PLAIN))


def test_every_field_is_where_the_compiler_puts_it(tmp_path: Path) -> None:
    """Regression, projectcalico/calico 2a9648d33f: a hand-kept IPv6 layout had drifted from the C struct."""
    wanted, expressions = [], []
    for name, layout in abi.LAYOUTS.items():
        wanted += [layout.size, layout.alignment]
        expressions += [f"sizeof(struct {name})", f"_Alignof(struct {name})"]
        for field in layout.fields:
            wanted += [field.offset, field.size]
            expressions.append(f"offsetof(struct {name}, {field.name})")
            expressions.append(f"sizeof(((struct {name} *)0)->{field.name})")
    found = compiled(tmp_path, expressions)
    assert dict(zip(expressions, found, strict=True)) == dict(zip(expressions, wanted, strict=True))


def test_every_constant_has_the_compilers_value(tmp_path: Path) -> None:
    names = list(abi.CONSTANTS)
    assert dict(zip(names, compiled(tmp_path, names), strict=True)) == abi.CONSTANTS


@pytest.mark.parametrize("name", abi.LAYOUTS)
def test_packing_puts_each_field_at_its_offset(name: str) -> None:
    layout = abi.LAYOUTS[name]
    for index, field in enumerate(layout.fields):
        ones = b"\xff" * field.size if field.format.endswith("s") else (1 << 8 * field.size) - 1
        values = [b"" if each.format.endswith("s") else 0 for each in layout.fields]
        packed = layout.pack(*(ones if i == index else value for i, value in enumerate(values)))
        assert packed == bytes(field.offset) + b"\xff" * field.size + bytes(
            layout.size - field.offset - field.size
        )
        assert layout.offset(field.name) == field.offset


def test_numbers_are_in_the_machines_own_byte_order() -> None:
    layout = abi.parse("struct pair { __u32 one; __u16 two; __be16 three; };").layouts["pair"]
    assert layout.pack(1, 2, 3) == struct.pack("@IHH", 1, 2, 3)


@pytest.mark.parametrize(
    "body",
    [
        "__u8 one; __u16 two;",
        "__u16 one; __u32 two;",
        "__u32 one; __u64 two;",
        "__u8 one; struct address two;",
        "__u32 one; __u16 two;",
        "__u64 one; __u32 two;",
        "struct address one; __u8 two;",
        "__u8 three[3]; __u16 two;",
    ],
)
def test_a_struct_with_implicit_padding_is_rejected(body: str) -> None:
    """Keys are compared bytewise: uninitialized padding makes two keys of one."""
    with pytest.raises(ValueError, match=r"struct bad: implicit padding"):
        abi.parse("struct address { __be32 word[4]; };\nstruct bad { " + body + " };")


@pytest.mark.parametrize(
    "body",
    [
        "__u32 flags : 3;",
        "__u32 *pointer;",
        "unsigned int number;",
        "__u32 one, two;",
        "union { __u32 one; __u32 two; } both;",
        "__u32 grid[2][2];",
        "__u8 size[UNKNOWN];",
        "size_t number;",
        "long number;",
        "struct unknown other;",
        "enum kind kind;",
    ],
)
def test_an_unsupported_declaration_is_rejected(body: str) -> None:
    with pytest.raises(ValueError):
        abi.parse("struct bad { " + body + " };")


def test_text_that_is_neither_struct_nor_enum_nor_number_is_rejected() -> None:
    for text in (
        "typedef __u32 id;",
        "#define WIDE (1 << 4)",
        "#define HEX 0x10",
        "union both { __u32 a; };",
    ):
        with pytest.raises(ValueError):
            abi.parse(text)


def test_an_enumerator_without_a_value_is_rejected() -> None:
    with pytest.raises(ValueError):
        abi.parse("enum kind { ONE = 1, TWO };")


def test_a_packed_struct_is_rejected() -> None:
    with pytest.raises(ValueError):
        abi.parse("struct bad { __u32 one; __u32 two; } __attribute__((packed));")
