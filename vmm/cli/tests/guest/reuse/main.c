/*
 * Whether a process can read what another had before it, in the same host process: at
 * addresses where that one had memory, in its registers, in what gates hand over.
 *
 * `reuse` has children that fill memory and registers, then others, of the same and of
 * another user, that look; it prints how many pages and registers still had a mark.
 */
#define _GNU_SOURCE
#include <cpuid.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096UL
#define BASE 0x300000000UL
#define AREAS 6
#define AREA_PAGES 256UL
#define APART 0x1000000UL
#define ROUNDS 60
#define MARK 0x5ec2e7a75ec2e7a7UL
#define OTHER_USER 1000

static sigjmp_buf back;
static volatile char *volatile nowhere = (void *)8;
/* Who looks has the mark in no register. */
static volatile unsigned long flipped_mark = ~MARK;

static void on_fault(int signal)
{
	siglongjmp(back, signal);
}

static void fill(void)
{
	unsigned long mark[2] = { MARK, MARK };

	for (unsigned long area = 0; area < AREAS; area++) {
		char *at = mmap((void *)(BASE + area * APART), AREA_PAGES * PAGE,
				PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED,
				-1, 0);

		for (unsigned long page = 0; page < AREA_PAGES; page++)
			*(unsigned long *)(at + page * PAGE) = MARK;
	}
	__asm__ volatile("movdqu %0, %%xmm9\n\tmovdqu %0, %%xmm15\n\tmov %1, %%r12"
			 : : "m"(mark), "r"(MARK) : "xmm9", "xmm15", "r12");
	/* A signal frame on the host's stack has them all. */
	if (!sigsetjmp(back, 1))
		*nowhere = 1;
}

static int has_mark(const volatile unsigned long *at, unsigned long words)
{
	for (unsigned long i = 0; i < words; i++)
		if (~at[i] == flipped_mark)
			return 1;
	return 0;
}

/* The pages of the thread in the host process, which GS leads to, if gates are there */
static int stub_has_mark(void)
{
	unsigned a, b = 0, c, d;
	unsigned long base = 0;

	if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & 1))
		return 0;
	__asm__ volatile("rdgsbase %0" : "=r"(base));
	return base && !sigsetjmp(back, 1) && has_mark((void *)base, 2 * PAGE / 8);
}

/* Pages with a mark; a page alone that can be read is one too many. */
static int look(void)
{
	volatile int seen = stub_has_mark();

	for (volatile unsigned long area = 0; area < AREAS; area++)
		for (volatile unsigned long page = 0; page < AREA_PAGES; page++) {
			if (sigsetjmp(back, 1))
				continue;
			(void)*(volatile char *)(BASE + area * APART + page * PAGE);
			seen++;
		}
	return seen;
}

int main(void)
{
	int seen = 0, status;

	setbuf(stdout, NULL);
	signal(SIGSEGV, on_fault);
	for (int round = 0; round < ROUNDS; round++) {
		if (fork() == 0) {
			fill();
			if (round & 1)
				kill(getpid(), SIGKILL);
			_exit(0);
		}
		wait(NULL);
		if (fork() == 0) {
			if (round & 2 && (setgid(OTHER_USER) || setuid(OTHER_USER)))
				_exit(99);
			_exit(look() ? 1 : 0);
		}
		wait(&status);
		seen += status != 0;
	}
	printf("%d of %d saw something\n", seen, ROUNDS);
	return seen != 0;
}
