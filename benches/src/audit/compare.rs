//! What one host process has mapped against what the guest kernel says of it.

use std::collections::HashMap;
use std::io;
use std::ops::Range;

use super::host::Mapping;
use super::memory::{Access, Entry, Memory, PAGE, Process, Run};

/// Something that is mapped and must not be, or not so.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Finding {
    /// In the cell's pid namespace.
    pub inner_pid: i32,
    pub what: &'static str,
    pub address: u64,
    pub offset: u64,
    pub access: Access,
}

/// What one look at a cell is made of.
pub struct Look<'a> {
    pub memory: &'a Memory,
    /// The memory file, as a mapping's file.
    pub file: &'a str,
    pub copies: &'a HashMap<(u64, u64), u64>,
    /// The addresses of gates and of the kernel's image.
    pub reserved: &'a Range<u64>,
    /// Those where each process has the same, and what that is.
    pub shared: &'a Range<u64>,
    pub own: &'a [Run],
    pub findings: Vec<Finding>,
    pub page_count: u64,
}

impl Look<'_> {
    pub fn find(&mut self, process: &Process, what: &'static str, run: Run) {
        self.findings.push(Finding {
            inner_pid: process.inner_pid,
            what,
            address: run.start,
            offset: run.offset,
            access: run.access,
        });
    }

    /// Looks at `process`, which has `mappings`.
    pub fn at(&mut self, process: &Process, mappings: &[Mapping]) -> io::Result<()> {
        let task_size = self.memory.task_size;
        let reserved = self.reserved.clone();
        for mapping in mappings {
            for part in parts(mapping.run, &[reserved.start, reserved.end, task_size]) {
                let is_users = part.start < task_size && !reserved.contains(&part.start);
                if is_users && mapping.file != self.file {
                    self.find(process, "is not the guest's memory", part);
                } else if is_users {
                    self.users(process, part)?;
                } else if part.start >= task_size && !self.memory.is_fused {
                    self.stubs(process, mapping, part);
                }
            }
        }
        let found = of_file(mappings, self.file, self.shared);
        self.compare(process, &found, self.own, "is no gate");
        if let Some(runs) = &process.runs {
            let users = [0..reserved.start, reserved.end..task_size];
            let mapped: Vec<Run> =
                users.iter().flat_map(|range| of_file(mappings, self.file, range)).collect();
            let mut known = runs.clone();
            known.sort_unstable();
            self.compare(process, &mapped, &known, "is not in the record");
        }
        Ok(())
    }

    /// Pages at addresses of user code: as the page table has them, or as the copies that
    /// programs execute.
    fn users(&mut self, process: &Process, part: Run) -> io::Result<()> {
        // What is left of one that has ended is dropped before another begins, by its record.
        let Some(mm) = process.mm else { return Ok(()) };
        for page in pages(part) {
            self.page_count += 1;
            let what = match self.memory.entry(mm, page.start)? {
                Entry::Changed => continue,
                Entry::None => "is in no page table",
                Entry::Page(phys, access) => {
                    // With keys there are some that have no jumps.
                    let keys = [page.start, page.start | 1];
                    let is_copy = page.access.execute
                        && !page.access.write
                        && keys
                            .iter()
                            .any(|at| self.copies.get(&(phys, *at)) == Some(&page.offset));
                    if page.offset != phys && !is_copy {
                        "is another page than in the page table"
                    } else if !page.access.is_within(access) {
                        "permits more than the page table"
                    } else {
                        continue;
                    }
                }
            };
            self.find(process, what, page);
        }
        Ok(())
    }

    /// Above: the pages of the stub, each after its kind, and the host's vDSO.
    fn stubs(&mut self, process: &Process, mapping: &Mapping, part: Run) {
        if ["[vdso]", "[vvar]", "[vvar_vclock]", "[vsyscall]"].contains(&&*mapping.name) {
            return;
        }
        let start = self.memory.stub_start;
        for page in pages(part) {
            let (r, w, x) = (page.access.read, page.access.write, page.access.execute);
            let is_right = match page.start.wrapping_sub(start) / PAGE {
                _ if page.start < start || mapping.file != self.file => false,
                // The code, and the control page of the process
                0 => (r, w, x) == (true, false, true),
                1 => (r, w, x) == (true, false, false),
                // Of each thread: its control page, its signal stack
                index => (r, w, x) == (true, index % 2 == 1, false),
            };
            if !is_right {
                self.find(process, "is no page of a stub", page);
            }
        }
    }

    /// What differs between two lists in order, as found.
    fn compare(&mut self, process: &Process, mapped: &[Run], wanted: &[Run], what: &'static str) {
        let (mapped, wanted) = (merged(mapped), merged(wanted));
        if mapped == wanted {
            return;
        }
        let differ: Vec<Run> = mapped.iter().filter(|run| !wanted.contains(run)).copied().collect();
        let missing = wanted.iter().filter(|run| !mapped.contains(run)).copied();
        let missing: Vec<Run> = missing.collect();
        for run in &differ {
            self.find(process, what, *run);
        }
        if differ.is_empty() {
            for run in missing {
                self.find(process, "is missing", run);
            }
        }
    }
}

/// `run`, divided at `at`, in ascending order.
fn parts(run: Run, at: &[u64]) -> Vec<Run> {
    let mut parts = Vec::new();
    let mut rest = run;
    for &cut in at {
        if rest.start < cut && cut < rest.end {
            parts.push(Run { end: cut, ..rest });
            rest.offset += cut - rest.start;
            rest.start = cut;
        }
    }
    parts.push(rest);
    parts
}

fn pages(run: Run) -> impl Iterator<Item = Run> {
    (run.start..run.end).step_by(PAGE as usize).map(move |start| Run {
        start,
        end: start + PAGE,
        offset: run.offset + (start - run.start),
        access: run.access,
    })
}

/// What `mappings` have of `file` in `range`.
pub fn of_file(mappings: &[Mapping], file: &str, range: &Range<u64>) -> Vec<Run> {
    let of_file = mappings.iter().filter(|mapping| mapping.file == file);
    let cut = of_file.flat_map(|mapping| parts(mapping.run, &[range.start, range.end]));
    cut.filter(|run| range.contains(&run.start)).collect()
}

/// The same, neighbours that continue each other as one.
fn merged(runs: &[Run]) -> Vec<Run> {
    let mut merged: Vec<Run> = Vec::new();
    for &run in runs {
        match merged.last_mut() {
            Some(last)
                if last.end == run.start
                    && last.access == run.access
                    && last.offset + (last.end - last.start) == run.offset =>
            {
                last.end = run.end;
            }
            _ => merged.push(run),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(start: u64, end: u64, offset: u64) -> Run {
        Run { start, end, offset, access: Access::default() }
    }

    #[test]
    fn a_mapping_is_divided_where_its_addresses_have_another_meaning() {
        let whole = run(0x1000, 0x6000, 0x9000);
        let divided = [run(0x1000, 0x2000, 0x9000), run(0x2000, 0x6000, 0xa000)];
        assert_eq!(parts(whole, &[0x2000, 0x6000]), divided);
        assert_eq!(parts(whole, &[0x1000]), [whole]);
    }

    #[test]
    fn what_continues_is_one() {
        let first = run(0x1000, 0x2000, 0x9000);
        assert_eq!(merged(&[first, run(0x2000, 0x3000, 0xa000)]), [run(0x1000, 0x3000, 0x9000)]);
        let other = run(0x2000, 0x3000, 0xc000);
        assert_eq!(merged(&[first, other]), [first, other]);
    }
}
