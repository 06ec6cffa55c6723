/*
 * Threads that change a mapping while others use it: once a change has returned,
 * no thread may see what was there before. `shootdown SECONDS THREADS` prints a
 * line `CASE ROUNDS USES STALE` for each case. With a last word `lazy` the changes are
 * not made, and what the threads see is stale.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL
#define RW (PROT_READ | PROT_WRITE)
#define STAMPS 64UL
#define THREADS_MAX 16
/* Fewer uses than these say nothing: a case goes on for longer then. */
#define USES_MIN 100

static int memory; /* page n holds the number n, then n + STAMPS, ... */
static volatile uint64_t *page;
/* Odd while a change is under way; else twice the number of the last change. */
static uint64_t sequence;
static uint64_t stale, uses;
static int done, lazy;
static __thread sigjmp_buf back;

static uint64_t load(uint64_t *at)
{
	return __atomic_load_n(at, __ATOMIC_SEQ_CST);
}

static void step(uint64_t *at)
{
	__atomic_fetch_add(at, 1, __ATOMIC_SEQ_CST);
}

static uint64_t now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000UL + now.tv_nsec / 1000000;
}

static void on_fault(int signal)
{
	(void)signal;
	siglongjmp(back, 1);
}

/*
 * A pause in which the users of the page can look at it. On one CPU they run when this
 * thread is about to leave a call, which is mostly the change: so some pauses, after odd
 * and after even changes, give the CPU away.
 */
static void let_look(uint64_t round)
{
	for (volatile int i = 0; i < 300; i++)
		;
	if (round % 63 == 0)
		sched_yield();
}

/* One change of the mapping, number `round`; the next undoes it where need be. */
static void replace(uint64_t round)
{
	mmap((void *)page, PAGE, RW, MAP_SHARED | MAP_FIXED, memory, round % STAMPS * PAGE);
	if (page[0] != round % STAMPS)
		step(&stale);
}

static void unmap(uint64_t round)
{
	if (round & 1)
		munmap((void *)page, PAGE);
	else
		mmap((void *)page, PAGE, RW, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
}

static void protect(uint64_t round)
{
	mprotect((void *)page, PAGE, round & 1 ? PROT_READ : RW);
}

static void drop(uint64_t round)
{
	page[2] = round;
	madvise((void *)page, PAGE, MADV_DONTNEED);
}

static void move(uint64_t round)
{
	static char *aside;

	if (!aside)
		aside = mmap(NULL, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (round & 1)
		mremap((void *)page, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, aside);
	else
		mremap(aside, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)page);
}

/* One use: whether it is as it may be after change number `round`. */
static int reads_the_stamp(uint64_t round)
{
	return page[0] == round % STAMPS;
}

static int read_faults_when_odd(uint64_t round)
{
	if (sigsetjmp(back, 1))
		return round & 1;
	(void)page[0];
	return !(round & 1);
}

static int write_faults_when_odd(uint64_t round)
{
	if (sigsetjmp(back, 1))
		return round & 1;
	page[1] = round;
	return !(round & 1);
}

static int reads_nothing(uint64_t round)
{
	(void)round;
	return page[2] == 0;
}

static const struct {
	const char *name;
	void (*change)(uint64_t round);
	int (*use)(uint64_t round);
} cases[] = {
	{ "replace", replace, reads_the_stamp },
	{ "munmap", unmap, read_faults_when_odd },
	{ "mprotect", protect, write_faults_when_odd },
	{ "dontneed", drop, reads_nothing },
	{ "mremap", move, read_faults_when_odd },
};
static int current;

/* A use counts where no change came in between. */
static void *use(void *unused)
{
	while (!__atomic_load_n(&done, __ATOMIC_SEQ_CST)) {
		uint64_t before = load(&sequence);
		int right = before & 1 ? 1 : cases[current].use(before / 2);

		if (before & 1 || before != load(&sequence))
			continue;
		step(&uses);
		if (!right)
			step(&stale);
	}
	return unused;
}

static void run(int seconds, int threads)
{
	pthread_t ids[THREADS_MAX];
	uint64_t round = 0, until = now_ms() + seconds * 1000UL, latest = until + 20000;
	int users = threads - 1;

	page = mmap(NULL, PAGE, RW, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	page[0] = 0;
	sequence = stale = uses = done = 0;
	for (int t = 0; t < users; t++)
		pthread_create(&ids[t], NULL, use, NULL);
	do {
		step(&sequence);
		round++;
		if (!lazy)
			cases[current].change(round);
		step(&sequence);
		let_look(round);
	} while (now_ms() < until || (load(&uses) < USES_MIN && now_ms() < latest));
	__atomic_store_n(&done, 1, __ATOMIC_SEQ_CST);
	for (int t = 0; t < users; t++)
		pthread_join(ids[t], NULL);
	printf("%s %lu %lu %lu\n", cases[current].name, round, uses, stale);
	fflush(stdout);
}

static void *count_up(void *unused)
{
	while (!__atomic_load_n(&done, __ATOMIC_SEQ_CST))
		page[0]++;
	return unused;
}

/* What a thread writes after fork is its process's, not the child's. */
static void run_fork(int seconds, int threads)
{
	pthread_t ids[THREADS_MAX];
	uint64_t rounds = 0, until = now_ms() + seconds * 1000UL;
	int status;

	page = mmap(NULL, PAGE, RW, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	stale = done = 0;
	for (int t = 0; t < threads - 1; t++)
		pthread_create(&ids[t], NULL, count_up, NULL);
	do {
		pid_t child = fork();

		if (child == 0) {
			uint64_t first = page[0];

			for (int i = 0; i < 20; i++) {
				let_look(1);
				if (page[0] != first)
					_exit(1);
			}
			_exit(0);
		}
		waitpid(child, &status, 0);
		stale += status != 0;
		rounds++;
	} while (now_ms() < until);
	__atomic_store_n(&done, 1, __ATOMIC_SEQ_CST);
	for (int t = 0; t < threads - 1; t++)
		pthread_join(ids[t], NULL);
	printf("fork %lu %lu %lu\n", rounds, rounds, stale);
}

int main(int argc, char **argv)
{
	int seconds = argc > 2 ? atoi(argv[1]) : 1, threads = argc > 2 ? atoi(argv[2]) : 2;
	struct sigaction action = { .sa_handler = on_fault, .sa_flags = SA_NODEFER };

	if (threads < 2 || threads > THREADS_MAX)
		return 2;
	lazy = argc == 4 && !strcmp(argv[3], "lazy");
	sigaction(SIGSEGV, &action, NULL);
	sigaction(SIGBUS, &action, NULL);
	memory = memfd_create("stamps", 0);
	ftruncate(memory, STAMPS * PAGE);
	for (uint64_t n = 0; n < STAMPS; n++)
		pwrite(memory, &n, sizeof(n), n * PAGE);
	for (current = 0; current < (int)(sizeof(cases) / sizeof(*cases)); current++)
		run(seconds, threads);
	run_fork(seconds, threads);
	return 0;
}
