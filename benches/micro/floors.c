/*
 * What a guest kernel in user space is made of: the host's own price of a hand-off
 * between two processes, and of a page that a signal handler maps. Natively these
 * rows are the floor of a system call and of a fault in stub mode.
 */
#define _GNU_SOURCE
#include "micro.h"

#include <linux/futex.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* One page in this many faults, so that no two are neighbours; as in memory.c. */
#define SPARSE 16
#define FAULTS_MAX (1L << 12)

/* Words in two cache lines: what each of the two waits for. */
struct turns {
	_Alignas(64) _Atomic uint32_t there;
	_Alignas(64) _Atomic uint32_t back;
};

static void futex(_Atomic uint32_t *word, int operation, uint32_t value)
{
	syscall(SYS_futex, word, operation, value, NULL, NULL, 0);
}

static void give(_Atomic uint32_t *word, uint32_t turn)
{
	atomic_store(word, turn);
	futex(word, FUTEX_WAKE, 1);
}

static void await(_Atomic uint32_t *word, uint32_t turn)
{
	while (atomic_load(word) != turn)
		futex(word, FUTEX_WAIT, turn - 1);
}

/* A word in shared memory goes to another process and back. */
static uint64_t futex_rt(long count)
{
	struct turns *turns = must_map(NULL, PAGE, PROT_READ | PROT_WRITE,
				       MAP_SHARED | MAP_ANONYMOUS, -1);
	pid_t child = must(fork(), "fork");
	uint64_t start;

	if (child == 0) {
		for (uint32_t turn = 1; turn <= count; turn++) {
			await(&turns->there, turn);
			give(&turns->back, turn);
		}
		_exit(0);
	}
	start = now_ns();
	for (uint32_t turn = 1; turn <= count; turn++) {
		give(&turns->there, turn);
		await(&turns->back, turn);
	}
	start = now_ns() - start;
	reap(child);
	munmap(turns, PAGE);
	return start;
}

static int pages_fd;
static long pages_mapped;

/* Each page comes from elsewhere in the file, as a guest's pages do. */
static void map_page(int signal, siginfo_t *info, void *context)
{
	uintptr_t page = (uintptr_t)info->si_addr & ~(PAGE - 1);
	off_t offset = PAGE * (pages_mapped++ * 7 % FAULTS_MAX);

	(void)signal;
	(void)context;
	if (mmap((void *)page, PAGE, PROT_READ | PROT_WRITE,
		 MAP_SHARED | MAP_FIXED | MAP_POPULATE, pages_fd, offset) == MAP_FAILED)
		_exit(1);
}

/* Writes to single pages where nothing is mapped; a handler maps pages of a file. */
static uint64_t fault_by_signal(long count)
{
	struct sigaction action = { .sa_sigaction = map_page, .sa_flags = SA_SIGINFO }, old;
	size_t bytes = FAULTS_MAX * PAGE, area = count * SPARSE * PAGE;
	uint64_t start;
	char *at;

	pages_fd = must(memfd_create("pages", MFD_CLOEXEC), "memfd_create");
	must(ftruncate(pages_fd, bytes), "ftruncate");
	at = must_map(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, pages_fd);
	for (size_t i = 0; i < bytes; i += PAGE)
		at[i] = 1;
	munmap(at, bytes);

	at = must_map(NULL, area, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
	must(munmap(at, area), "munmap");
	must(sigaction(SIGSEGV, &action, &old), "sigaction");
	start = now_ns();
	/* A prime factor visits each once, far from the one before. */
	for (long i = 0; i < count; i++)
		*(volatile char *)(at + i * 2654435761UL % count * SPARSE * PAGE) = 1;
	start = now_ns() - start;
	must(sigaction(SIGSEGV, &old, NULL), "sigaction");
	munmap(at, area);
	close(pages_fd);
	return start;
}

const struct measure floors[] = {
	{ "futex_rt", EACH, 1, 1 << 20, futex_rt },
	{ "fault_by_signal", EACH, 1, FAULTS_MAX, fault_by_signal },
	{ 0 },
};
