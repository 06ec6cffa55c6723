/*
 * Random calls that change mappings, from processes and threads that come and go, while
 * somebody looks from the host whether what is mapped is right: `exocell bench audit`.
 *
 * `churn SECONDS SEED PROCESSES` prints how many steps were made. They like addresses that
 * are special: gates, the vDSO, the ends of tables of page tables, the top. A process may
 * well destroy itself by a step; its parent makes another.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL
/* Away from all places */
#define COUNTER 0x600000000UL
#define DEPTH_MAX 3
#define THREADS_MAX 3
#define STEPS_MAX 4000
/* So often all is quiet for a while, longer than a change takes. */
#define QUIET_EVERY 64
#define QUIET_US 40000
/* Of a process that does nothing any more */
#define LIFE_SECONDS 60

static const char *program;
static time_t until;
static volatile unsigned long *steps;
static int file;

/* Where to, and how far from there */
static struct {
	unsigned long at, pages;
} places[] = {
	{ 0x5f000000, 0x140 },	/* Gates, all of them */
	{ 0x5effe000, 4 },	/* Their edges */
	{ 0x5f05e000, 4 },
	{ 0x5f0fe000, 4 },
	{ 0x5f13e000, 4 },
	{ 0x5ff00000, 0x200 },	/* The image, with --intra none */
	{ 0x10000, 64 },
	{ 0x10000000, 0x800 },
	{ 0x3fff0000, 32 },	/* Where tables of page tables end */
	{ 0x7ffff0000, 32 },
	{ 0x7ffffff000, 2 },
	{ 0x3fffffff000, 4 },
	{ 0x200000000, 0x4000 },
	{ 0, 16 },		/* The vDSO */
};
#define PLACES (sizeof(places) / sizeof(*places))

static time_t now(void)
{
	return syscall(SYS_time, NULL);
}

static unsigned long next(unsigned long *seed)
{
	*seed = *seed * 6364136223846793005UL + 1442695040888963407UL;
	return *seed >> 24;
}

static char *pick(unsigned long *seed, unsigned long *len)
{
	unsigned place = next(seed) % PLACES;
	unsigned long from = next(seed) % places[place].pages;

	*len = (1 + next(seed) % (next(seed) % 4 ? 4 : places[place].pages + 2)) * PAGE;
	if (next(seed) % 8 == 0) {
		from = 0;
		*len = places[place].pages * PAGE;
	}
	return (char *)places[place].at + from * PAGE - (next(seed) % 16 == 0) * PAGE;
}

static __thread sigjmp_buf back;
static __thread volatile int probing;

static void on_fault(int signal)
{
	if (!probing)
		_exit(128 + signal);
	siglongjmp(back, 1);
}

static void touch(char *at, int writes)
{
	probing = 1;
	if (!sigsetjmp(back, 1)) {
		if (writes)
			*(volatile char *)at += 1;
		else
			(void)*(volatile char *)at;
	}
	probing = 0;
}

/* Where programs can write to what the guest kernel needs, with --intra none */
static int is_open;
#define OPEN_FROM 0x5f000000UL
#define OPEN_TO 0x70000000UL

static int may_write(const char *at)
{
	return !is_open || (unsigned long)at < OPEN_FROM || (unsigned long)at >= OPEN_TO;
}

/* Most of a range: what is written can be found again somewhere else. */
static void use(unsigned long *seed, char *at, unsigned long len)
{
	unsigned long pages = len / PAGE;

	for (int i = 0; i < 8; i++) {
		char *page = at + next(seed) % pages * PAGE;

		touch(page, next(seed) % 3 && may_write(page));
	}
}

/* Never below where it was, for there are things of the C library. */
static void move_break(long by)
{
	static long grown;

	if (grown + by >= 0 && sbrk(by) != (void *)-1)
		grown += by;
}

static int some_prot(unsigned long *seed)
{
	static const int prots[] = { 0, 1, 3, 3, 3, 5, 7 };

	return prots[next(seed) % 7];
}

static void change_mapping(unsigned long *seed)
{
	static const int advices[] = {
		MADV_DONTNEED, MADV_DONTNEED, MADV_FREE, MADV_DONTFORK, MADV_DOFORK,
		MADV_WIPEONFORK, MADV_REMOVE, MADV_COLD, MADV_PAGEOUT, MADV_WILLNEED, 102, 103,
	};
	unsigned long len, to_len;
	char *at = pick(seed, &len), *to = pick(seed, &to_len);

	switch (next(seed) % 12) {
	case 0:
	case 1:
		mmap(at, len, some_prot(seed), MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
		break;
	case 2:
		mmap(at, len, some_prot(seed), MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
		break;
	case 3:
		mmap(at, len, next(seed) % 2 ? 5 : 3, MAP_PRIVATE | MAP_FIXED, file, 0);
		break;
	case 4:
	case 5:
		munmap(at, len);
		break;
	case 6:
		mprotect(at, len, some_prot(seed));
		break;
	case 7:
		mremap(at, len, to_len, MREMAP_MAYMOVE | MREMAP_FIXED, to);
		break;
	case 8:
		mremap(at, len, to_len, MREMAP_MAYMOVE);
		break;
	case 9:
		madvise(at, len, advices[next(seed) % (sizeof(advices) / sizeof(*advices))]);
		break;
	case 10:
		syscall(SYS_remap_file_pages, at, len, 0, next(seed) % 4, 0);
		mlock(at, len);
		break;
	default:
		if (next(seed) % 8 == 0)
			mmap(at, PAGE, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_GROWSDOWN |
			     MAP_FIXED_NOREPLACE, -1, 0);
		move_break(next(seed) % 2 ? 8 * (long)PAGE : -4 * (long)PAGE);
	}
	use(seed, at, len);
	if (next(seed) % 4 == 0)
		use(seed, to, to_len);
}

static void live(unsigned long seed, int depth);

static void *thread(void *seed)
{
	unsigned long own = (unsigned long)seed;

	for (int i = 0; i < STEPS_MAX / 20 && now() < until; i++)
		change_mapping(&own);
	return NULL;
}

static void have_child(unsigned long *seed, int depth)
{
	unsigned long own = next(seed), how = next(seed);
	char text[3][24];

	pid_t child = how % 8 ? fork() : vfork();

	if (child == 0 && how % 8 == 0)
		_exit(0);
	if (child == 0 && how % 3 == 0) {
		snprintf(text[0], sizeof(text[0]), "%ld", (long)(until - now()));
		snprintf(text[1], sizeof(text[1]), "%lu", own);
		snprintf(text[2], sizeof(text[2]), "-%d", depth + 1);
		execl(program, program, text[0], text[1], text[2], NULL);
	}
	if (child == 0) {
		live(own, depth + 1);
		_exit(0);
	}
	if (next(seed) % 2)
		usleep(next(seed) % 3000);
	if (next(seed) % 4 == 0)
		kill(child, SIGKILL);
	if (next(seed) % 2)
		waitpid(child, NULL, 0);
}

static void live(unsigned long seed, int depth)
{
	unsigned long count = 1 + next(&seed) % (STEPS_MAX >> depth * 2);
	pthread_t threads[THREADS_MAX];
	int thread_count = 0;

	alarm(LIFE_SECONDS);
	for (unsigned long i = 0; i < count && now() < until; i++) {
		unsigned long what = next(&seed) % 64;

		__atomic_add_fetch(steps, 1, __ATOMIC_RELAXED);
		if (what == 0 && depth < DEPTH_MAX)
			have_child(&seed, depth);
		else if (what == 1 && thread_count < THREADS_MAX)
			thread_count += !pthread_create(&threads[thread_count], NULL, thread,
							(void *)next(&seed));
		else
			change_mapping(&seed);
		if (next(&seed) % QUIET_EVERY == 0)
			usleep(QUIET_US);
		while (waitpid(-1, NULL, WNOHANG) > 0)
			;
	}
	for (int i = 0; i < thread_count; i++)
		pthread_join(threads[i], NULL);
}

static void look_for_kernel(void)
{
	char line[512];
	FILE *maps = fopen("/proc/self/maps", "r");

	while (fgets(line, sizeof(line), maps))
		is_open |= strstr(line, "[kernel]") != NULL;
	fclose(maps);
}

static void begin(void)
{
	struct sigaction action = { .sa_handler = on_fault, .sa_flags = SA_NODEFER };
	struct rlimit little = { 4UL << 20, 4UL << 20 };

	places[PLACES - 1].at = getauxval(AT_SYSINFO_EHDR) - 8 * PAGE;
	sigaction(SIGSEGV, &action, NULL);
	sigaction(SIGBUS, &action, NULL);
	setrlimit(RLIMIT_MEMLOCK, &little);
	file = open(program, O_RDONLY | O_CLOEXEC);
	look_for_kernel();
}

int main(int argc, char **argv)
{
	unsigned long deaths = 0, made = 0, seed;
	int processes, status;

	if (argc != 4)
		return 2;
	program = argv[0];
	if (getuid() == 0 && (setgid(1000) || setuid(1000)))
		return 3;
	until = now() + atol(argv[1]);
	seed = strtoul(argv[2], NULL, 10);
	processes = atoi(argv[3]);
	steps = mmap((void *)COUNTER, PAGE, PROT_READ | PROT_WRITE,
		     MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	begin();
	if (processes < 0) {
		live(seed, -processes);
		return 0;
	}
	for (int running = 0; now() < until || running; ) {
		if (running < processes && now() < until) {
			made++;
			running++;
			if (fork() == 0) {
				live(next(&seed) ^ made, 0);
				_exit(0);
			}
			continue;
		}
		if (wait(&status) < 0)
			break;
		running--;
		deaths += status != 0;
	}
	printf("%lu steps, %lu processes, %lu destroyed themselves\n", *steps, made, deaths);
	return *steps == 0;
}
