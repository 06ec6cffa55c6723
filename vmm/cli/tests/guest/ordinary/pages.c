/*
 * The kernel copies to a page of a private mapping of another's file, while other threads
 * take the page away: it must copy to a page of the mapping's own or fail, never to the file.
 */
#include "ordinary.h"

#define WORD "changed"
/* Pages before the one that is copied to: one who writes to them all may want those behind. */
#define BEFORE 3
/* Where in the page */
#define WORD_AT 256

static int file;
static char *map, *page;
static size_t length;
static volatile int begun;

/* Maps the file for this process alone. */
static int map_file(void)
{
	file = open(FILE_OF_ROOT, O_RDONLY);
	length = (lseek(file, 0, SEEK_END) + PAGE - 1) & ~(PAGE - 1);
	map = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
	if (file < 0 || map == MAP_FAILED || open(FILE_OF_ROOT, O_WRONLY) >= 0) {
		snprintf(found, sizeof(found), "%s is not as it must be", FILE_OF_ROOT);
		return -1;
	}
	page = map + BEFORE * PAGE;
	return 0;
}

static int is_changed(void)
{
	char now[sizeof(WORD)];

	return pread(file, now, sizeof(now), page + WORD_AT - map) == sizeof(now) &&
	       !memcmp(now, WORD, sizeof(WORD));
}

/* Has the kernel write to the page from a pipe, which must hold the word. */
static void copy(int *ends)
{
	char rest[sizeof(WORD)];

	if (read(ends[0], page + WORD_AT, sizeof(WORD)) != sizeof(WORD))
		read(ends[0], rest, sizeof(rest));
}

static void *copies(void *unused)
{
	int ends[2];

	(void)unused;
	pipe(ends);
	while (!is_over) {
		write(ends[1], WORD, sizeof(WORD));
		copy(ends);
	}
	return NULL;
}

static void *drops(void *unused)
{
	(void)unused;
	while (!is_over) {
		madvise(page, PAGE, MADV_DONTNEED);
		(void)*(volatile char *)page;
	}
	return NULL;
}

/* The same, with pages behind it that have to be read from the disk: the copy waits for them,
   and another thread runs, on one processor too. */
static void *copies_slowly(void *unused)
{
	int ends[2];

	(void)unused;
	madvise(map, length, MADV_RANDOM);
	pipe(ends);
	while (!is_over) {
		begun = 0;
		write(ends[1], WORD, sizeof(WORD));
		madvise(map, length, MADV_DONTNEED);
		posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
		for (long i = BEFORE; i > 0; i--)
			page[-(long)PAGE * i] = 1;
		madvise(page + PAGE, length - (BEFORE + 1) * PAGE, MADV_DONTNEED);
		posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
		begun = 1;
		copy(ends);
		/* The next turn would have it read anew. */
		is_over |= is_changed();
	}
	return NULL;
}

static void *drops_meanwhile(void *unused)
{
	(void)unused;
	while (!is_over) {
		if (!begun) {
			sched_yield();
			continue;
		}
		madvise(page, PAGE, MADV_DONTNEED);
		(void)*(volatile char *)page;
	}
	return NULL;
}

static int is_file_changed(void *(**threads)(void *))
{
	if (map_file())
		return 1;
	posix_fadvise(file, 0, 0, POSIX_FADV_RANDOM);
	race(threads, 2, is_changed);
	return is_changed();
}

int page_of_anothers_file(void)
{
	void *(*threads[])(void *) = { copies, drops };

	return is_file_changed(threads);
}

int page_read_ahead(void)
{
	void *(*threads[])(void *) = { copies_slowly, drops_meanwhile };

	return is_file_changed(threads);
}

/* Tables of page tables of its own. */
#define REGION ((char *)0x700000000000UL)
#define REGION_BYTES (4UL << 20)

static void *reads(void *unused)
{
	int zero = open("/dev/zero", O_RDONLY);

	(void)unused;
	for (unsigned turn = 0; !is_over; turn++)
		read(zero, REGION + turn % 8 * 64 * PAGE + WORD_AT, 64);
	return NULL;
}

static void *unmaps(void *unused)
{
	(void)unused;
	while (!is_over) {
		mmap(REGION, REGION_BYTES, PROT_READ | PROT_WRITE,
		     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
		for (int i = 0; i < 30; i++)
			__asm__ volatile("pause");
		munmap(REGION, REGION_BYTES);
	}
	return NULL;
}

static int never(void)
{
	return 0;
}

/* Page tables go while the kernel copies: the kernel lives. */
int munmap_beside_read(void)
{
	void *(*threads[])(void *) = { reads, unmaps };

	race(threads, 2, never);
	return 0;
}

/* What a program may not read the kernel does not read for it. */
int no_access(void)
{
	char *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int ends[2], broken;

	pipe(ends);
	strcpy(page, "secret");
	mprotect(page, PAGE, PROT_NONE);
	broken = write(ends[1], page, 6) >= 0 || errno != EFAULT;
	mprotect(page, PAGE, PROT_READ);
	broken |= write(ends[1], page, 6) != 6 || read(ends[0], page, 6) >= 0;
	return broken;
}
