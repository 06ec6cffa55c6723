/*
 * A guest kernel's side of the Pager's ring: usage: guest RING DOORBELL MEMORY BYTES,
 * three descriptors and the size of the memory. Reads lines, and says one for each:
 *
 *   put KIND FIRST PAGES    one request; its answer
 *   many N KIND FIRST PAGES N requests, each of the next range, one ring; their sum
 *   touch PAGE              what is there, before it is written to
 *   skip N                  claims N requests more than there are
 */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "pager_ring.h"

static struct pager_ring *ring;
static int doorbell;

static void *map(int fd, size_t bytes)
{
	void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	if (at == MAP_FAILED) {
		perror("mmap");
		exit(1);
	}
	return at;
}

static void fill(unsigned long long kind, unsigned long long first, unsigned long long pages)
{
	struct pager_ring_entry *entry = &ring->entries[ring->put % PAGER_RING_ENTRIES];

	entry->kind = kind;
	entry->first = first;
	entry->pages = pages;
	atomic_store_explicit((_Atomic unsigned int *)&ring->put, ring->put + 1, memory_order_release);
}

static void rings(void)
{
	unsigned long long one = 1;

	if (write(doorbell, &one, sizeof(one)) != sizeof(one))
		exit(1);
}

/* The sum of the answers from @from on, once all are there. */
static unsigned long long answers(unsigned int from)
{
	unsigned long long sum = 0;

	while (atomic_load_explicit((_Atomic unsigned int *)&ring->done, memory_order_acquire) !=
	       ring->put)
		usleep(100);
	for (; from != ring->put; from++)
		sum += ring->entries[from % PAGER_RING_ENTRIES].answer;
	return sum;
}

int main(int argc, char **argv)
{
	unsigned long long n, kind, first, pages;
	unsigned char *memory;
	char line[128];

	if (argc != 5)
		return 2;
	ring = map(atoi(argv[1]), sizeof(*ring));
	doorbell = atoi(argv[2]);
	memory = map(atoi(argv[3]), strtoul(argv[4], NULL, 0));
	while (fgets(line, sizeof(line), stdin)) {
		unsigned int from = ring->put;

		if (sscanf(line, "put %llu %llu %llu", &kind, &first, &pages) == 3) {
			fill(kind, first, pages);
			rings();
			printf("%llu\n", answers(from));
		} else if (sscanf(line, "many %llu %llu %llu %llu", &n, &kind, &first, &pages) == 4) {
			for (unsigned long long i = 0; i < n; i++)
				fill(kind, first + i * pages, pages);
			rings();
			printf("%llu\n", answers(from));
		} else if (sscanf(line, "touch %llu", &first) == 1) {
			printf("%u\n", memory[first * 4096]);
			memory[first * 4096] = 7;
		} else if (sscanf(line, "skip %llu", &n) == 1) {
			ring->put += n;
			rings();
			puts("0");
		}
		fflush(stdout);
	}
	return 0;
}
