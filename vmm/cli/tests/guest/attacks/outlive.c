/*
 * Memory that a program uses after it has given it up. By the gate a program says itself
 * that it waits for an answer: one that says so and goes on runs beside the guest kernel.
 */
#include "attacks.h"

#include <cpuid.h>

#define AREA_PAGES 64UL
#define MARK 0x0101010101010101UL
#define OTHERS_MARK 0x5e5e5e5e5e5e5e5eUL
#define ROUNDS 40

/* Of arch/um/include/shared/skas/stub-data.h in the patched kernel */
struct gate {
	unsigned called, asleep;
	unsigned long cell, ax, bx, dx, di, si, r8, r9, r10;
};

/* Seen by both: what the one that goes on sees, and that it goes on. */
static volatile struct {
	unsigned long beats, changed, others, ends;
} *shared;

static volatile struct gate *find_gate(void)
{
	unsigned a, b = 0, c, d;
	unsigned long base = 0;

	if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && b & 1)
		__asm__ volatile("rdgsbase %0" : "=r"(base));
	/* The same site each time comes by the gate from the second time on. */
	for (int i = 0; i < 3; i++)
		__asm__ volatile("mov $39, %%eax\n\tsyscall\n\tcmp $-4095, %%rax"
				 : : : "rax", "rcx", "r11", "memory");
	if (!base || !((struct gate *)(base + PAGE))->called)
		return NULL;
	return (void *)(base + PAGE);
}

/* Makes a call and waits for nothing: what there is of @area is looked at meanwhile. */
static void call_and_go_on(volatile struct gate *gate, unsigned long nr, unsigned long di,
			   unsigned long si, volatile unsigned long *area, unsigned long looks)
{
	unsigned long words = AREA_PAGES * PAGE / 8;

	/* A fault would be a stop. */
	shared->changed += 0;
	gate->ax = nr;
	gate->di = di;
	gate->si = si;
	__atomic_add_fetch(&gate->called, 1, __ATOMIC_SEQ_CST);
	for (unsigned long look = 0; look < looks; look++) {
		shared->beats++;
		for (unsigned long i = 0; i < words; i += PAGE / 8) {
			unsigned long word = area[i + 8];

			shared->changed += word != MARK;
			shared->others += word == OTHERS_MARK;
		}
	}
}

static volatile unsigned long *fill(unsigned long mark)
{
	unsigned long *area = mmap(NULL, AREA_PAGES * PAGE, PROT_READ | PROT_WRITE,
				   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	for (unsigned long i = 0; i < AREA_PAGES * PAGE / 8; i++)
		area[i] = mark;
	return area;
}

static int begin(void)
{
	shared = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (find_gate())
		return 1;
	snprintf(found, sizeof(found), "no gate");
	return 0;
}

static int end(void)
{
	snprintf(found, sizeof(found), "%lu looks, changed %lu, another's %lu", shared->beats,
		 shared->changed, shared->others);
	return shared->changed != 0;
}

/* Another program, into which memory goes that is free now */
static void take_memory(void)
{
	if (fork() == 0) {
		for (int i = 0; i < 16; i++)
			fill(OTHERS_MARK);
		_exit(0);
	}
	wait(NULL);
}

/* A program that has ended must not run. */
int outlive_exit(void)
{
	if (!begin())
		return 0;
	for (int round = 0; round < ROUNDS && !shared->changed; round++) {
		pid_t child = fork();
		unsigned long beats;

		if (child == 0) {
			volatile unsigned long *area = fill(MARK);

			for (int i = 1; i < 32; i++)
				signal(i, SIG_DFL);
			call_and_go_on(find_gate(), SYS_exit_group, 0, 0, area, ~0UL);
			_exit(1);
		}
		for (int i = 0; i < 50 && !waitpid(child, NULL, WNOHANG); i++)
			usleep(2000);
		kill(child, SIGKILL);
		waitpid(child, NULL, 0);
		beats = shared->beats;
		take_memory();
		usleep(10000);
		shared->ends += shared->beats != beats;
		if (shared->ends) {
			end();
			return 1;
		}
	}
	return end();
}

/* Nor is memory still there that it has unmapped, once it may be another's. */
int outlive_munmap(void)
{
	if (!begin())
		return 0;
	for (int round = 0; round < ROUNDS && !shared->changed; round++) {
		pid_t child = fork();

		if (child == 0) {
			volatile unsigned long *area = fill(MARK);

			for (int i = 1; i < 32; i++)
				signal(i, SIG_DFL);
			alarm(2);
			call_and_go_on(find_gate(), SYS_munmap, (unsigned long)area,
				       AREA_PAGES * PAGE, area, 100000);
			_exit(1);
		}
		for (int i = 0; i < 4; i++)
			take_memory();
		waitpid(child, NULL, 0);
	}
	return end();
}
