/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * What the kernel's headers would have given and user space's do not.
 */
#pragma once

#ifndef AF_INET
#define AF_INET	 2
#define AF_INET6 10
#endif

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

/* Keep the compiler from knowing a value, so that it makes the very comparison that the verifier is
 * to see, and not one that comes to the same.
 */
#define hide(value) asm volatile("" : "+r"(value))

/* Whether a u64 is within bounds, by comparing it with each: clang would compare once, after taking
 * the lower one off, from which kernels before 98d7ca374ba4 (6.11) learn nothing of the value.
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

/* Count on at the end of a loop's body, and close the loop by a jump: before 10e14e9652bf (6.8) the
 * kernel refuses one whose body just falls into its head.
 */
#define again(counter, step)                                                                       \
	({                                                                                         \
		(counter) += (step);                                                               \
		asm volatile("goto +0" : "+r"(counter));                                           \
	})

/* Of bytes on the stack that are also written in words. */
#define ALIGNED __attribute__((aligned(4)))

/* A key of 32 bits on the stack, of which the verifier keeps account by words of 64: one that is
 * written by half still counts for what was in it before, and the same instructions are followed
 * again for each thing that may have been.
 */
#define WORD_KEY(name, value) u32 name[2] __attribute__((aligned(8))) = {value}
