/* Bandwidths, counted in MiB, and how far a second processor helps. */
#define _GNU_SOURCE
#include "micro.h"

#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MIB (1UL << 20)
#define BUFFER (8 * MIB)
#define BLOCK (64UL << 10)
/* The steps of one unit of work, about a tenth of a millisecond. */
#define STEPS 100000

static char *buffer(char fill)
{
	char *at = must_map(NULL, BUFFER, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);

	memset(at, fill, BUFFER);
	return at;
}

static uint64_t bw_memcpy(long mib)
{
	char *from = buffer(1), *to = buffer(2);
	uint64_t start = now_ns();

	for (long i = 0; i < mib; i++) {
		size_t at = i % (BUFFER / MIB) * MIB;

		memcpy(to + at, from + at, MIB);
		__asm__ volatile("" : : "r"(to) : "memory");
	}
	start = now_ns() - start;
	munmap(from, BUFFER);
	munmap(to, BUFFER);
	return start;
}

static uint64_t bw_pipe(long mib)
{
	int ends[2];
	char *block = buffer(1);
	size_t left = mib * MIB;
	uint64_t start;
	pid_t child;

	must(pipe(ends), "pipe");
	child = must(fork(), "fork");
	if (child == 0) {
		close(ends[0]);
		while (left > 0)
			left -= must(write(ends[1], block, left < BLOCK ? left : BLOCK), "write");
		_exit(0);
	}
	close(ends[1]);
	start = now_ns();
	while (left > 0) {
		ssize_t got = must(read(ends[0], block, BLOCK), "read");

		if (got == 0)
			break;
		left -= got;
	}
	start = now_ns() - start;
	close(ends[0]);
	reap(child);
	munmap(block, BUFFER);
	if (left > 0)
		fail("the pipe ended early");
	return start;
}

static uint64_t bw_file(long mib)
{
	int fd = must(open(big_file, O_RDONLY), big_file);
	char *block = buffer(1);
	uint64_t start = now_ns();

	for (size_t done = 0; done < mib * MIB; done += BLOCK)
		must(pread(fd, block, BLOCK, done % FILE_BYTES), "pread");
	start = now_ns() - start;
	close(fd);
	munmap(block, BUFFER);
	return start;
}

static void *compute(void *units)
{
	uint64_t x = 1;

	for (long i = *(long *)units * STEPS; i > 0; i--)
		x = x * 6364136223846793005UL + 1442695040888963407UL;
	return (void *)x;
}

static uint64_t with_threads(int threads, long *units)
{
	pthread_t ids[2];
	uint64_t start = now_ns();

	for (int i = 0; i < threads; i++)
		if (pthread_create(&ids[i], NULL, compute, units))
			fail("pthread_create");
	for (int i = 0; i < threads; i++)
		pthread_join(ids[i], NULL);
	return now_ns() - start;
}

/* Two threads do twice the work of one: 2.0 where they run at once, 1.0 in turns. */
static uint64_t threads_2(long units)
{
	uint64_t one = with_threads(1, &units), two = with_threads(2, &units);

	ratio = 2.0 * one / two;
	return (one + two) / 50; /* long samples: the scheduler must spread the threads */
}

const struct measure bandwidth[] = {
	{ "bw_memcpy", RATE, 1, 1 << 12, bw_memcpy },
	{ "bw_pipe", RATE, 1, 1 << 12, bw_pipe },
	{ "bw_file", RATE, 1, 1 << 12, bw_file },
	{ "threads_2", RATIO, 2, 1 << 20, threads_2 },
	{ 0 },
};
