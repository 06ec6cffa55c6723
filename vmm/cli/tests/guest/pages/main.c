/*
 * Looks for pages that are stale, shared or not zero: usage: pages SECONDS BYTES WORKERS [MISDEED].
 *
 * Each worker maps memory of random sizes, of its own (anonymous) or of a file in
 * memory, demands that it is zero, writes into each page who has it, and demands
 * later that this is still there. Some regions are given up piece by piece, some
 * are copied by a child that writes to its copy. Prints what it found and exits
 * with 1 if that was not right. MISDEED `dirty` or `shared` has it find something.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096ul
#define WORDS (PAGE / sizeof(uint64_t))
#define REGIONS 64

struct region {
	uint64_t *at;
	size_t pages;
	uint64_t tag;
};

static struct region regions[REGIONS];
static uint64_t state, tags, checked;
static size_t held, held_max;
static const char *misdeed = "";

static uint64_t draw(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state;
}

static void wrong(const char *what, const uint64_t *at, uint64_t expected)
{
	printf("WRONG %s at %p: %#llx instead of %#llx\n", what, (void *)at,
	       (unsigned long long)*at, (unsigned long long)expected);
	fflush(stdout);
	_exit(1);
}

/*
 * Reading alone shows the one page of zeros that stands for what nobody has
 * written to. So most pages are written to first, one word of each.
 */
static void demand_zero(const struct region *r, size_t first, size_t end)
{
	if (draw() % 4)
		for (size_t page = first; page < end; page++)
			*(volatile uint64_t *)&r->at[page * WORDS + draw() % WORDS] = 0;
	for (uint64_t *w = r->at + first * WORDS; w < r->at + end * WORDS; w++)
		if (*w)
			wrong("not zero", w, 0);
}

/* Every word of a page says whose page it is. */
static void mark(const struct region *r, size_t first, size_t end, uint64_t tag)
{
	for (size_t page = first; page < end; page++)
		for (size_t i = 0; i < WORDS; i++)
			r->at[page * WORDS + i] = tag + page;
}

static void demand_marks(const struct region *r)
{
	for (size_t page = 0; page < r->pages; page++)
		for (size_t i = 0; i < WORDS; i++)
			if (r->at[page * WORDS + i] != r->tag + page)
				wrong("not ours", &r->at[page * WORDS + i], r->tag + page);
	checked += r->pages;
}

static void take(struct region *r)
{
	static const size_t sizes[] = { 1, 3, 16, 40, 250, 1100 };
	int flags = MAP_PRIVATE;

	r->pages = 1 + draw() % sizes[draw() % 6];
	if (held + r->pages > held_max)
		return;
	if (draw() % 4 == 0)
		flags = MAP_SHARED;
	r->at = mmap(NULL, r->pages * PAGE, PROT_READ | PROT_WRITE, flags | MAP_ANONYMOUS, -1, 0);
	if (r->at == MAP_FAILED) {
		r->at = NULL;
		return;
	}
	held += r->pages;
	r->tag = (uint64_t)getpid() << 40 | ++tags << 16;
	if (!strcmp(misdeed, "dirty"))
		r->at[r->pages * WORDS - 1] = 1;
	demand_zero(r, 0, r->pages);
	mark(r, 0, r->pages, r->tag);
	if (!strcmp(misdeed, "shared"))
		mark(r, 0, 1, r->tag + 1);
}

static void drop(struct region *r)
{
	demand_marks(r);
	munmap(r->at, r->pages * PAGE);
	held -= r->pages;
	r->at = NULL;
}

/* Every other page goes, and comes back as zero. */
static void renew(const struct region *r)
{
	for (size_t page = draw() % 2; page < r->pages; page += 2) {
		madvise(r->at + page * WORDS, PAGE, MADV_REMOVE);
		madvise(r->at + page * WORDS, PAGE, MADV_DONTNEED);
		demand_zero(r, page, page + 1);
		mark(r, page, page + 1, r->tag);
	}
	demand_marks(r);
}

/* A child writes to its copies; ours stay. */
static void copy(void)
{
	pid_t child = fork();

	if (child == 0) {
		for (int i = 0; i < REGIONS; i += 3)
			if (regions[i].at)
				demand_marks(&regions[i]);
		_exit(0);
	}
	int status = 0;
	if (child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) &&
	    WEXITSTATUS(status))
		_exit(1);
}

static int work(int seconds)
{
	time_t end = time(NULL) + seconds;

	while (time(NULL) < end)
		for (int i = 0; i < 40; i++) {
			struct region *r = &regions[draw() % REGIONS];
			unsigned choice = draw() % 100;

			if (!r->at)
				take(r);
			else if (choice < 60)
				drop(r);
			else if (choice < 75)
				renew(r);
			else if (choice < 76)
				copy();
			else
				demand_marks(r);
		}
	printf("%llu pages were right\n", (unsigned long long)checked);
	return 0;
}

int main(int argc, char **argv)
{
	int seconds = argc > 1 ? atoi(argv[1]) : 10, failed = 0, status;
	int workers = argc > 3 ? atoi(argv[3]) : 4;

	if (argc > 4)
		misdeed = argv[4];
	held_max = (argc > 2 ? strtoull(argv[2], NULL, 0) : 64ul << 20) / PAGE / workers;
	for (int i = 0; i < workers; i++)
		if (fork() == 0) {
			state = 88172645463325252ull * (i + 1) + i;
			return work(seconds);
		}
	while (wait(&status) > 0)
		failed |= status;
	puts(failed ? "pages: FAILED" : "pages: ok");
	return failed != 0;
}
