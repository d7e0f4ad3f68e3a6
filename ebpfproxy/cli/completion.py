"""``ebpfproxy completion``: completion of command lines in bash, zsh and fish.

A script asks ``ebpfproxy`` itself for each completion, with the command line up to the cursor. Click finds
what can follow. Its own scripts are not used, because they do not complete ``--flag=value`` in zsh, in fish,
and in bash after another such word, nor words with colons in bash.
"""

import os
import re

import click
from click.shell_completion import CompletionItem, ShellComplete, add_completion_class, split_arg_string

from ebpfproxy.cli import COMPLETION_VARIABLE
from ebpfproxy.cli.epilog import examples
from ebpfproxy.config.command import FlagsCommand

_LINE = "_EBPFPROXY_LINE"
"""The environment variable with the command line up to the cursor."""
_ATTACHED = re.compile(r"--[^=]+=")

_BASH = """\
# Completion of ebpfproxy in bash 4.4 or newer.
_ebpfproxy() {
    local line="${COMP_LINE:0:COMP_POINT}" breaks= before= type value
    local word="${line##*[[:space:]]}"
    # Bash replaces only the part of the word after the last of these characters.
    [[ $COMP_WORDBREAKS == *=* ]] && breaks+="="
    [[ $COMP_WORDBREAKS == *:* ]] && breaks+=":"
    [[ $breaks ]] && before="${word%%"${word##*[$breaks]}"}"
    COMPREPLY=()
    while IFS=$'\\t' read -r type value _; do
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain) COMPREPLY+=("${value#"$before"}") ;;
        esac
    done < <(%(variable)s=bash_complete %(line)s="$line" "$1" 2>/dev/null)
}
complete -o nosort -F _ebpfproxy ebpfproxy
"""

_ZSH = """\
#compdef ebpfproxy
# Completion of ebpfproxy in zsh.
_ebpfproxy() {
    local -a items fields
    local answer
    for answer in "${(@f)$(%(variable)s=zsh_complete %(line)s="${(j: :)words[1,CURRENT]}" \\
            "${(Q)words[1]}" 2>/dev/null)}"; do
        fields=("${(@ps:\\t:)answer}")
        case $fields[1] in
            dir) compset -P '--*='; _files -/ ;;
            file) compset -P '--*='; _files ;;
            plain) items+=("${fields[2]//:/\\\\:}:$fields[3]") ;;
        esac
    done
    (( $#items )) && _describe -V ebpfproxy items
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _ebpfproxy "$@"
else
    compdef _ebpfproxy ebpfproxy
fi
"""

_FISH = """\
# Completion of ebpfproxy in fish.
function __ebpfproxy_complete
    set -l program (commandline -opc)[1]
    set -l line (commandline -cp | string collect)
    for answer in (env %(variable)s=fish_complete %(line)s="$line" $program 2>/dev/null)
        set -l fields (string split \\t -- $answer)
        set -l flag (string match -r -- '^--[^=]+=' $fields[2])
        set -l path (string replace -r -- '^--[^=]+=' '' $fields[2])
        switch $fields[1]
            case dir
                for each in (__fish_complete_directories "$path")
                    echo "$flag$each"
                end
            case file
                for each in (__fish_complete_path "$path")
                    echo "$flag$each"
                end
            case plain
                printf '%%s\\t%%s\\n' $fields[2] "$fields[3]"
        end
    end
end
complete --command ebpfproxy --no-files --keep-order --arguments '(__ebpfproxy_complete)'
"""


class _Completion(ShellComplete):
    """Reads what the scripts set, and prints lines for them: type, word and help, separated by tabs."""

    def source_vars(self) -> dict[str, str]:  # type: ignore[override]
        return {"variable": self.complete_var, "line": _LINE}

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ.get(_LINE, "")
        words = split_arg_string(line)
        incomplete = "" if not words or line[-1].isspace() else words.pop()
        return words[1:], incomplete

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        """Return complete words, also for the value in ``--flag=value``; none after an error."""
        flag = _ATTACHED.match(incomplete)
        try:
            items = super().get_completions(args, incomplete)
        except Exception:  # an error between the user's words would only confuse
            return []
        for item in items if flag else ():
            item.value = flag[0] + item.value  # type: ignore[index]
        return items

    def format_completion(self, item: CompletionItem) -> str:
        text = " ".join((item.help or "").split())
        return f"{item.type}\t{item.value}\t{text.partition('. ')[0].removesuffix('.')}"


@add_completion_class
class _Bash(_Completion):
    name = "bash"
    source_template = _BASH


@add_completion_class
class _Zsh(_Completion):
    name = "zsh"
    source_template = _ZSH


@add_completion_class
class _Fish(_Completion):
    name = "fish"
    source_template = _FISH


SHELLS: dict[str, type[_Completion]] = {each.name: each for each in (_Bash, _Zsh, _Fish)}


@click.command(
    "completion",
    cls=FlagsCommand,
    epilog=examples("""
    # For all users of bash.
    ebpfproxy completion bash >/etc/bash_completion.d/ebpfproxy
    # For all users of zsh.
    ebpfproxy completion zsh >/usr/local/share/zsh/site-functions/_ebpfproxy
    # For all users of fish.
    ebpfproxy completion fish >/etc/fish/completions/ebpfproxy.fish
    """),
)
@click.argument("shell", type=click.Choice(list(SHELLS)), metavar="bash|zsh|fish")
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the script that completes command lines in a shell: commands, flags, modes and files.

    It also completes --service of dump, monitor and top if the user may read the BPF maps. A shell that
    starts afterwards uses the script.
    """
    root = context.find_root()
    click.echo(SHELLS[shell](root.command, {}, "ebpfproxy", COMPLETION_VARIABLE).source(), nl=False)
