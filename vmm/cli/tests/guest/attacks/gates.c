/* The gate, by which system calls come without the host: its page, forged. */
#include "attacks.h"

#include <cpuid.h>

/* Of arch/um/include/shared/skas/gate.h and stub-abi.h in the patched kernel */
#define CELLS 0x5f100000UL
#define CELL_SIZE 64
#define CELL_COUNT 4096
#define SLEEP_NR 0x3ffffffdUL
#define TIMES 20000

struct gate {
	unsigned called, asleep;
	unsigned long cell, ax, bx, dx, di, si, r8, r9, r10;
};

static volatile struct gate *gate;

/* Calls that a process may make with any arguments, and those that take a frame. */
static const unsigned long numbers[] = {
	SYS_getpid, SYS_gettid, SYS_sched_yield, SYS_rt_sigreturn, SYS_sigaltstack,
	SYS_arch_prctl, SYS_getuid, SLEEP_NR, ~0UL,
};

static unsigned long next(unsigned long x)
{
	return x * 6364136223846793005UL + 1442695040888963407UL;
}

/* Calls that nobody makes, from cells that may be there, and sleeps for them. */
static void *forge(void *seed)
{
	for (unsigned long x = (unsigned long)seed;; x = next(x)) {
		unsigned long what = x >> 40;

		if (what & 1)
			gate->cell = CELLS + (what >> 8) % CELL_COUNT * CELL_SIZE + (what >> 3 & 4);
		if (what & 2)
			gate->ax = numbers[(what >> 8) % (sizeof(numbers) / sizeof(*numbers))];
		if (what & 4)
			gate->asleep = gate->called - (what >> 8) % 3;
		if (what & 8)
			gate->called += (what >> 8) % 3;
		if (what & 16)
			gate->bx = gate->dx = gate->r10 = x;
	}
	return NULL;
}

/* The same site each time: a call that comes by the gate from the second time on. */
static __attribute__((noinline)) long call(void)
{
	long result;

	__asm__ volatile("mov $39, %%eax\n\tsyscall\n\tcmp $-4095, %%rax"
			 : "=a"(result)
			 :
			 : "rcx", "r11", "memory");
	return result;
}

static int forge_and_call(void *seed)
{
	pthread_t thread;

	pthread_create(&thread, NULL, forge, seed);
	for (int i = 0; i < TIMES; i++)
		call();
	return 0;
}

/* By itself: sleeps that nobody told of, calls from cells that are none. */
static int forge_alone(void *seed)
{
	unsigned long x = (unsigned long)seed;

	catch_faults();
	for (int i = 0; i < 200; i++, x = next(x)) {
		unsigned long site = sites[(x >> 33) % site_count];

		gate->cell = x & 0x10000 ? x : CELLS + (x >> 40) % CELL_COUNT * CELL_SIZE;
		gate->called += x >> 20 & 1;
		if (fork() == 0) {
			/* Behind each call instruction of the gate is code that goes on. */
			__asm__ volatile("mov %0, %%rax\n\tmov %1, %%rbx\n\tjmp *%2"
					 :
					 : "r"(SLEEP_NR - (x >> 50 & 1)), "r"((char *)gate - PAGE),
					   "r"(site)
					 : "rax", "rbx", "rcx", "r11", "memory");
			__builtin_unreachable();
		}
		waitpid(-1, NULL, WNOHANG);
	}
	return 0;
}

/* What matters: that the guest kernel lives, and other programs run. */
int forge_gate(void)
{
	unsigned a, b = 0, c, d;
	unsigned long base = 0;

	if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && b & 1)
		__asm__ volatile("rdgsbase %0" : "=r"(base));
	for (int i = 0; i < 3; i++)
		call();
	gate = (void *)(base + PAGE);
	if (base == 0 || gate->called == 0) {
		snprintf(found, sizeof(found), "no gate");
		return 0;
	}
	snprintf(found, sizeof(found), "gate at %p", (void *)gate);
	for (unsigned long seed = 1; seed <= 12; seed++) {
		in_child(forge_and_call, (void *)seed);
		in_child(forge_alone, (void *)seed);
	}
	return 0;
}
