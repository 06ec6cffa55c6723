/* The stub's own pages: remapped, rewritten, forged. */
#include "attacks.h"

/* What leads to the gate is the same for all programs; they see it as a mapping. */
static int is_of_gates(unsigned long page)
{
	return page >> 32 == 0;
}

/* Guest calls that name the stub's pages must be refused, or change nothing. */
int remap_stub(void)
{
	for (int p = 0; p < page_count; p++) {
		void *at = (void *)pages[p];

		snprintf(found, sizeof(found), "a guest call changed the page at %p", at);
		if (mprotect(at, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC) == 0 ||
		    munmap(at, PAGE) == 0 ||
		    mmap(at, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED,
			 -1, 0) == at ||
		    (madvise(at, PAGE, MADV_DONTNEED) == 0 && !is_of_gates(pages[p])) ||
		    !is_readable(pages[p]))
			return 1;
	}
	snprintf(found, sizeof(found), "%d foreign pages", page_count);
	return 0;
}

/* Code of the stub that the guest may write runs in whoever comes next. */
int write_stub_code(void)
{
	for (int p = 0; p < page_count; p++) {
		int has_site = is_of_gates(pages[p]);

		for (int s = 0; s < site_count; s++)
			has_site |= (sites[s] & ~(PAGE - 1)) == pages[p];
		snprintf(found, sizeof(found), "the code page at %lx is writable", pages[p]);
		if (has_site && is_writable(pages[p]))
			return 1;
	}
	snprintf(found, sizeof(found), "%d foreign pages", page_count);
	return 0;
}

static unsigned long writable[PAGES_MAX];
static int writable_count;

static void *scribble(void *seed)
{
	unsigned long x = (unsigned long)seed;

	for (;;)
		for (int p = 0; p < writable_count; p++)
			for (unsigned long i = 0; i < PAGE; i += 8) {
				x = x * 6364136223846793005UL + 1442695040888963407UL;
				*(volatile unsigned long *)(writable[p] + i) =
					x & 1 ? x >> (x & 63) : x & 2 ? SYS_mmap : TARGET;
			}
	return NULL;
}

/* A thread fills the stub's data while the process maps, faults and calls. */
static int scribble_while_calling(void *seed)
{
	pthread_t thread;

	catch_faults();
	pthread_create(&thread, NULL, scribble, seed);
	for (int i = 0; i < 3000; i++) {
		char *at = mmap(NULL, 16 * PAGE, PROT_READ | PROT_WRITE,
				MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		for (int j = 0; j < 16 && at != MAP_FAILED; j++)
			is_writable((unsigned long)at + j * PAGE);
		munmap(at, 16 * PAGE);
		if (is_readable(TARGET))
			return 1;
	}
	return 0;
}

/* What matters beside the page: that the guest kernel lives. The caller sees that. */
int forge_data(void)
{
	for (int p = 0; p < page_count; p++)
		if (is_writable(pages[p]))
			writable[writable_count++] = pages[p];
	snprintf(found, sizeof(found), "%d writable foreign pages", writable_count);
	for (unsigned long seed = 1; seed <= 8; seed++)
		if (in_child(scribble_while_calling, (void *)seed))
			return 1;
	return 0;
}
