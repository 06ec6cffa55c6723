/*
 * Page faults and mappings, in pages of 4 KB.
 *
 * Memory is laid out as chunks of 1 MB at every 2 MB, so that no kernel can use
 * a huge page and no hint to any kernel is needed; smaller folios stay possible.
 */
#define _GNU_SOURCE
#include "micro.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHUNK (1UL << 20)
#define STRIDE (2 * CHUNK)
#define PAGES_PER_CHUNK ((long)(CHUNK / PAGE))
/* 64 MB of touched memory. */
#define PAGES_MAX (64 * PAGES_PER_CHUNK)
/* One page in this many is touched where faults shall not be neighbours. */
#define SPARSE 16

static char *reserved;

static long chunks_for(long pages)
{
	return (pages + PAGES_PER_CHUNK - 1) / PAGES_PER_CHUNK;
}

static char *page_at(long page)
{
	return reserved + page / PAGES_PER_CHUNK * STRIDE + page % PAGES_PER_CHUNK * PAGE;
}

/* Address space for the chunks, which are then mapped one by one. */
static void map_chunks(long chunks)
{
	reserved = must_map(NULL, (chunks + 1) * STRIDE, PROT_NONE,
			    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
	must(munmap(reserved, (chunks + 1) * STRIDE), "munmap");
	reserved = (char *)(((uintptr_t)reserved + STRIDE - 1) & ~(STRIDE - 1));
	for (long c = 0; c < chunks; c++)
		must_map(reserved + c * STRIDE, CHUNK, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1);
}

static void unmap_chunks(long chunks)
{
	for (long c = 0; c < chunks; c++)
		must(munmap(reserved + c * STRIDE, CHUNK), "munmap");
}

static uint64_t touch(long pages)
{
	uint64_t start = now_ns();

	for (long p = 0; p < pages; p++)
		*(volatile char *)page_at(p) = 1;
	return now_ns() - start;
}

static uint64_t fault_anon_seq(long pages)
{
	uint64_t ns;

	map_chunks(chunks_for(pages));
	ns = touch(pages);
	unmap_chunks(chunks_for(pages));
	return ns;
}

/* Writes to the first @count pages of @order, in an order that random() gives. */
static uint64_t touch_shuffled(long *order, long count, long chunks)
{
	uint64_t start;

	for (long i = count - 1; i > 0; i--) {
		long other = random() % (i + 1), page = order[i];

		order[i] = order[other];
		order[other] = page;
	}
	map_chunks(chunks);
	start = now_ns();
	for (long i = 0; i < count; i++)
		*(volatile char *)page_at(order[i]) = 1;
	start = now_ns() - start;
	unmap_chunks(chunks);
	return start;
}

/* Single pages, each alone in its group of SPARSE, the groups in a random order. */
static uint64_t fault_anon_rand(long count)
{
	static long order[PAGES_MAX / SPARSE];

	srandom(1);
	for (long i = 0; i < count; i++)
		order[i] = i * SPARSE + random() % SPARSE;
	return touch_shuffled(order, count, chunks_for(count * SPARSE));
}

/* All pages of a piece of memory, in a random order. */
static uint64_t fault_anon_dense(long count)
{
	static long order[PAGES_MAX / 4];

	srandom(1);
	for (long i = 0; i < count; i++)
		order[i] = i;
	return touch_shuffled(order, count, chunks_for(count));
}

/* Reads one page in SPARSE of a mapped file in the page cache: what a kernel maps
 * around the page is its own choice and its own gain. */
static uint64_t fault_file(long count)
{
	int fd = must(open(big_file, O_RDONLY), big_file);
	char *at = must_map(NULL, FILE_BYTES, PROT_READ, MAP_PRIVATE, fd);
	uint64_t start = now_ns();

	for (long i = 0; i < count; i++)
		(void)*(volatile char *)(at + i * SPARSE * PAGE);
	start = now_ns() - start;
	munmap(at, FILE_BYTES);
	close(fd);
	return start;
}

/* A child writes pages that it shares with its parent since fork. */
static uint64_t fault_cow(long pages)
{
	uint64_t *ns = must_map(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1);
	uint64_t found;
	pid_t child;

	map_chunks(chunks_for(pages));
	touch(pages);
	child = must(fork(), "fork");
	if (child == 0) {
		*ns = touch(pages);
		_exit(0);
	}
	reap(child);
	unmap_chunks(chunks_for(pages));
	found = *ns;
	munmap(ns, PAGE);
	return found;
}

/* mmap of a chunk and munmap of it with all pages touched; the touching is not timed. */
static uint64_t mmap_munmap(long pages)
{
	uint64_t ns = 0;

	for (long c = 0; c < chunks_for(pages); c++) {
		uint64_t start = now_ns();
		char *at = must_map(NULL, CHUNK, PROT_READ | PROT_WRITE,
				    MAP_PRIVATE | MAP_ANONYMOUS, -1);

		ns += now_ns() - start;
		for (size_t i = 0; i < CHUNK; i += PAGE)
			*(volatile char *)(at + i) = 1;
		start = now_ns();
		must(munmap(at, CHUNK), "munmap");
		ns += now_ns() - start;
	}
	return ns * pages / (chunks_for(pages) * PAGES_PER_CHUNK);
}

/* Write access taken from one page and given back: two calls. */
static uint64_t mprotect_(long count)
{
	char *at = must_map(NULL, CHUNK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	char *page = at + CHUNK / 2;
	uint64_t start;

	for (size_t i = 0; i < CHUNK; i += PAGE)
		at[i] = 1;
	start = now_ns();
	for (long i = 0; i < count; i++) {
		must(mprotect(page, PAGE, PROT_READ), "mprotect");
		must(mprotect(page, PAGE, PROT_READ | PROT_WRITE), "mprotect");
		*(volatile char *)page = 2;
	}
	start = now_ns() - start;
	munmap(at, CHUNK);
	return start;
}

const struct measure memory[] = {
	{ "fault_anon_seq", EACH, 1, PAGES_MAX, fault_anon_seq },
	{ "fault_anon_rand", EACH, 1, PAGES_MAX / SPARSE, fault_anon_rand },
	{ "fault_anon_dense", EACH, 1, PAGES_MAX / 4, fault_anon_dense },
	{ "fault_file", EACH, 1, FILE_BYTES / PAGE / SPARSE, fault_file },
	{ "fault_cow", EACH, 1, PAGES_MAX / 4, fault_cow },
	{ "mmap_munmap", EACH, 1, PAGES_MAX, mmap_munmap },
	{ "mprotect", EACH, 1, 1 << 20, mprotect_ },
	{ 0 },
};
