/*
 * Guest memory over time, as the guest uses it and as the host holds it.
 *
 * watch MS: in a cell, each MS milliseconds a line "TSC TSC FREE IDLE CACHE", in pages:
 *     free, free but on a CPU's list, and files that programs have read or written.
 * held MS FILE: on the host, "TSC TSC BYTES": what is allocated for FILE; some lines have
 *     one more number, what that would be if memory came and went in blocks of 2 MiB.
 * bursty SECONDS [SEED MB_MAX]: memory that comes and goes in bursts.
 * replay FILE SPEED MB_MAX: memory after a trace (t_s,mem_mb,...), a quarter of
 *     it as page cache of a file on the disk.
 * reclaim MB: takes a region and gives it up, "FAULT_NS FREE_NS" a page.
 * scattered MB: takes a region and gives up every other page of it, "FREE_NS" a page.
 *
 * Both sides say by the processor's time stamp counter, which guest and host share,
 * when they began to look and when they had.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <x86intrin.h>

#define PAGE 4096ul
#define MIB (1ul << 20)

static double now_s(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static void sleep_s(double s)
{
	struct timespec t = { (time_t)s, (long)((s - (time_t)s) * 1e9) };

	if (s > 0)
		nanosleep(&t, NULL);
}

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

static char *take(size_t bytes)
{
	char *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (at == MAP_FAILED)
		fail("mmap");
	for (size_t i = 0; i < bytes; i += PAGE)
		at[i] = 1;
	return at;
}

/* The sums over the zones, and of the files' pages, which zoneinfo has once a node. */
static void watch(double period_s)
{
	static char text[1 << 16];
	int fd = open("/proc/zoneinfo", O_RDONLY);

	if (fd < 0)
		fail("/proc/zoneinfo");
	for (;;) {
		uint64_t begin = __rdtsc();
		ssize_t got = pread(fd, text, sizeof(text) - 1, 0);
		uint64_t end = __rdtsc();
		unsigned long free_pages = 0, idle = 0, cache = 0;

		if (got <= 0)
			fail("/proc/zoneinfo");
		text[got] = '\0';
		for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
			unsigned long n;

			if (sscanf(line, " nr_free_pages %lu", &n) == 1)
				free_pages += n;
			else if (sscanf(line, " count: %lu", &n) == 1)
				idle += n;
			else if (sscanf(line, " nr_file_pages %lu", &n) == 1)
				cache += n;
		}
		printf("%llu %llu %lu %lu %lu\n", (unsigned long long)begin,
		       (unsigned long long)end, free_pages, idle, cache);
		fflush(stdout);
		sleep_s(period_s);
	}
}

#define BLOCK (2 * MIB)
/* To look for blocks takes the host about a thousand times as long as to ask for a size. */
#define BLOCKS_EACH 20

/* The blocks of @fd that have a page, in bytes. */
static unsigned long long blocks_held(int fd)
{
	unsigned long long bytes = 0;
	off_t at = 0;

	while ((at = lseek(fd, at, SEEK_DATA)) >= 0) {
		bytes += BLOCK;
		at = (at / BLOCK + 1) * BLOCK;
	}
	return bytes;
}

static void held(double period_s, const char *file)
{
	int fd = open(file, O_RDONLY);
	struct stat st;

	if (fd < 0)
		fail(file);
	/* The file lives as long as its cell, not as long as this. */
	for (unsigned i = 0;; i++) {
		uint64_t begin = __rdtsc();

		if (stat(file, &st) < 0)
			break;
		printf("%llu %llu %llu", (unsigned long long)begin, (unsigned long long)__rdtsc(),
		       st.st_blocks * 512ull);
		if (i % BLOCKS_EACH == 0)
			printf(" %llu", blocks_held(fd));
		puts("");
		fflush(stdout);
		sleep_s(period_s);
	}
}

/* Bursts of 8 MiB or more, some given up whole, some in pieces, some by halves. */
static void bursty(double seconds, unsigned seed, unsigned mib_max)
{
	double end = now_s() + seconds;

	if (mib_max < 8)
		mib_max = 8;
	srand(seed);
	while (now_s() < end) {
		size_t bytes = (8 + rand() % (mib_max - 7)) * MIB;
		char *at = take(bytes);

		sleep_s(0.05 + rand() % 20 / 100.0);
		for (size_t i = 0; rand() % 2 && i < bytes; i += 64 * PAGE)
			madvise(at + i, 32 * PAGE, MADV_DONTNEED);
		sleep_s(0.05);
		munmap(at, bytes);
		sleep_s(0.05 + rand() % 20 / 100.0);
	}
}

#define BLOCKS 65536
static char *blocks[BLOCKS];
static size_t nr_blocks;

/* Anonymous blocks of a MiB and the cache of a file, as large as asked for. */
static void resize(int file, size_t mib)
{
	size_t cached = mib / 4, anonymous = mib - cached;
	static size_t file_mib;
	char *buffer = malloc(MIB);

	memset(buffer, 1, MIB);
	for (; file_mib < cached; file_mib++)
		if (pwrite(file, buffer, MIB, file_mib * MIB) != (ssize_t)MIB)
			fail("write");
	if (file_mib > cached && ftruncate(file, cached * MIB) == 0)
		file_mib = cached;
	free(buffer);
	while (nr_blocks < anonymous && nr_blocks < BLOCKS)
		blocks[nr_blocks++] = take(MIB);
	while (nr_blocks > anonymous)
		munmap(blocks[--nr_blocks], MIB);
}

static void replay(const char *trace, double speed, double mib_max)
{
	FILE *lines = fopen(trace, "r");
	int file = open("/var/tmp", O_TMPFILE | O_RDWR, 0600);
	double start = now_s(), at_s, mib;
	char line[256];

	if (!lines || file < 0)
		fail(trace);
	while (fgets(line, sizeof(line), lines)) {
		if (sscanf(line, "%lf,%lf", &at_s, &mib) != 2)
			continue;
		sleep_s(start + at_s / speed - now_s());
		resize(file, mib < mib_max ? mib : mib_max);
	}
}

static double per_page(double since, size_t pages)
{
	return (now_s() - since) * 1e9 / pages;
}

static void reclaim(size_t mib)
{
	size_t bytes = mib * MIB, pages = bytes / PAGE;
	double start = now_s(), fault;
	char *at = take(bytes);

	fault = per_page(start, pages);
	start = now_s();
	munmap(at, bytes);
	printf("%.1f %.1f\n", fault, per_page(start, pages));
}

static void scattered(size_t mib)
{
	size_t bytes = mib * MIB, pages = bytes / PAGE;
	char *at = take(bytes);
	double start = now_s();

	for (size_t i = 0; i < bytes; i += 2 * PAGE)
		madvise(at + i, PAGE, MADV_DONTNEED);
	printf("%.1f\n", per_page(start, pages / 2));
}

int main(int argc, char **argv)
{
	const char *verb = argc > 1 ? argv[1] : "";

	if (!strcmp(verb, "watch") && argc == 3)
		watch(atof(argv[2]) / 1e3);
	else if (!strcmp(verb, "held") && argc == 4)
		held(atof(argv[2]) / 1e3, argv[3]);
	else if (!strcmp(verb, "bursty") && argc == 3)
		bursty(atof(argv[2]), 7, 160);
	else if (!strcmp(verb, "bursty") && argc == 5)
		bursty(atof(argv[2]), strtoul(argv[3], NULL, 0), strtoul(argv[4], NULL, 0));
	else if (!strcmp(verb, "replay") && argc == 5)
		replay(argv[2], atof(argv[3]), atof(argv[4]));
	else if (!strcmp(verb, "reclaim") && argc == 3)
		reclaim(strtoul(argv[2], NULL, 0));
	else if (!strcmp(verb, "scattered") && argc == 3)
		scattered(strtoul(argv[2], NULL, 0));
	else
		return 2;
	return 0;
}
