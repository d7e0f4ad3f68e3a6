/* Stands in for the kernel's own header. Features are probed; nothing may depend on this number. */
#pragma once
#define LINUX_VERSION_CODE 0
#define KERNEL_VERSION(a, b, c) (((a) << 16) + ((b) << 8) + (c))
