/* Stands in for the kernel's own header, of which bcc needs only that it is there. See ../README. */
#pragma once
#define CONFIG_BPF_SYSCALL 1
