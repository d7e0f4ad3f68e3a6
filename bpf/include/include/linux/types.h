/* Stands in for the kernel's own header: the kernel's names for user space's types. */
#pragma once
/* User space's linux/stddef.h would define it as plain inline. */
#undef __always_inline
#define __always_inline inline __attribute__((always_inline))
#include "/usr/include/linux/types.h"
typedef __u8 u8;
typedef __u16 u16;
typedef __u32 u32;
typedef __u64 u64;
typedef __s8 s8;
typedef __s16 s16;
typedef __s32 s32;
typedef __s64 s64;
typedef unsigned long uintptr_t;
typedef __SIZE_TYPE__ size_t;
typedef _Bool bool;
enum { false = 0, true = 1 };
