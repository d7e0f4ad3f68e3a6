/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Definitions that are in the kernel's internal headers, but not in the user-space headers.
 */
#pragma once

#ifndef AF_INET
#define AF_INET	 2
#define AF_INET6 10
#endif

/* include/uapi/linux/bpf.h, 6.3 and 6.7 */
#define FIB_LOOKUP_SKIP_NEIGHBOR 4
#define FIB_LOOKUP_SOURCE	 16

#ifndef barrier
#define barrier() asm volatile("" ::: "memory")
#endif

#ifndef NULL
#define NULL ((void *)0)
#endif

#ifndef ECONNREFUSED
#define EADDRINUSE   98
#define ECONNREFUSED 111
#endif

/* Hides a value from the optimizer. The compiler then emits exactly the comparison that the
 * verifier must see, instead of an equivalent one.
 */
#define hide(value) asm volatile("" : "+r"(value))

/* Whether a u64 is within bounds, with one comparison for each bound. clang would subtract the
 * lower bound and compare once. From that, kernels before 98d7ca374ba4 (6.11) derive no bounds for
 * the value.
 */
#define within(value, least, most)                                                                 \
	({                                                                                         \
		bool is_within = false;                                                            \
		hide(value);                                                                       \
		if ((value) >= (least)) {                                                          \
			hide(value);                                                               \
			is_within = (value) <= (most);                                             \
		}                                                                                  \
		is_within;                                                                         \
	})

/* Increments a loop counter at the end of the loop body, and closes the loop with a jump. Before
 * 10e14e9652bf (6.8) the kernel rejects a loop whose body falls through to its head.
 */
#define again(counter, step)                                                                       \
	({                                                                                         \
		(counter) += (step);                                                               \
		asm volatile("goto +0" : "+r"(counter));                                           \
	})

/* For byte arrays on the stack that are also written in words. */
#define ALIGNED __attribute__((aligned(4)))

/* A 32-bit key on the stack that fills a complete 64-bit word. The verifier tracks the stack in
 * such words. If only one half is written, the previous content of the word remains part of the
 * verifier's state. The verifier then checks the same instructions again for each previous content.
 */
#define WORD_KEY(name, value)                                                                      \
	u64 name##_word = KEY_WORD(value);                                                         \
	u32 *name = (u32 *)&name##_word

/* The 64-bit word whose first half in memory is `key`. */
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#define KEY_WORD(key) ((u64)(key) << 32)
#else
#define KEY_WORD(key) ((u64)(u32)(key))
#endif

/* A struct on the stack that is 0, with complete 64-bit words, for the same reason. `name` points
 * to it.
 */
#define WORD_STRUCT(type, name)                                                                    \
	u64 name##_words[(sizeof(type) + 7) / 8] = {};                                             \
	type *name = (type *)name##_words;                                                         \
	asm volatile("" : : "r"(name) : "memory")

/* A number that is written into the program when it is loaded: see `enum placeholder` in abi.h.
 * llvm.bpf.pseudo is a load of 64 bits that the optimizer does not look into.
 */
#define LOADED(what) ((u32)bpf_pseudo_fd(0, PLACEHOLDER_##what))

/* Whether the kernel has a helper: see features.py. The verifier knows the value. It neither checks
 * nor keeps a branch that cannot run (opt_hard_wire_dead_code_branches(), e2ae4ca266a1, 5.1), so
 * one object file serves all kernels.
 */
#define HAVE(helper) (bpf_pseudo_fd(0, PLACEHOLDER_HAVE_##helper) != 0)
