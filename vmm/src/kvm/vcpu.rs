//! A machine while it runs: a thread for each of its processors, until one of them ends it.

use std::convert::Infallible;
use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;
use std::thread;

use kvm_ioctls::{VcpuExit, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::bus::{self, Asked, Bus};
use super::error::KvmError;
use super::memory::RESET_MODE;

/// A processor's thread runs the loop below and messages to back ends.
const STACK_BYTES: usize = 128 << 10;
/// What a PC's firmware is told when a start is to leave out its tests; here it is told so after a
/// panic (`panic_warm` on the kernel's command line).
const WARM: u16 = 0x1234;
/// The process's end, as the supervisor sees it: of a guest that ended in order, of one whose
/// kernel panicked or whose processor could not go on, and of a machine that broke.
const ORDERLY: i32 = 0;
const DIED: i32 = 1;
const BROKEN: i32 = 125;

/// All of a machine; it lives as long as its process.
pub(super) struct Machine {
    pub vm: VmFd,
    pub memory: GuestMemoryMmap,
    pub processors: Vec<VcpuFd>,
    pub bus: Arc<Bus>,
    pub console: File,
}

impl Machine {
    /// Runs the machine to its end, which is the process's.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn run(self) -> Result<Infallible, KvmError> {
        let Self { vm: _vm, memory, processors, bus, console } = self;
        let threads = processors
            .into_iter()
            .enumerate()
            .map(|(id, vcpu)| {
                let console = console.try_clone().map_err(KvmError::host("keep the console"))?;
                let processor =
                    Processor { id, vcpu, bus: bus.clone(), memory: memory.clone(), console };
                thread::Builder::new()
                    .name(format!("vcpu {id}"))
                    .stack_size(STACK_BYTES)
                    .spawn(move || processor.run())
                    .map_err(KvmError::host("start a processor's thread"))
            })
            .collect::<Result<Vec<_>, _>>()?;
        for thread in threads {
            // One that panics has said so on the console.
            let _ = thread.join();
        }
        std::process::exit(BROKEN)
    }
}

struct Processor {
    id: usize,
    vcpu: VcpuFd,
    bus: Arc<Bus>,
    memory: GuestMemoryMmap,
    console: File,
}

/// Ends the process with the thread that has it: a machine with a processor less is none.
struct Last;

impl Drop for Last {
    fn drop(&mut self) {
        std::process::exit(BROKEN)
    }
}

impl Processor {
    fn run(mut self) {
        let _last = Last;
        loop {
            let broken = match self.vcpu.run() {
                Ok(VcpuExit::MmioRead(address, into)) => {
                    self.bus.read(address, into);
                    continue;
                }
                Ok(VcpuExit::MmioWrite(address, from)) => {
                    self.bus.write(address, from);
                    continue;
                }
                Ok(VcpuExit::IoIn(port, into)) => {
                    bus::read_port(port, into);
                    continue;
                }
                Ok(VcpuExit::IoOut(port, from)) => {
                    match bus::write_port(port, from, &self.console) {
                        Asked::Nothing => continue,
                        Asked::End => std::process::exit(self.how_it_ended()),
                    }
                }
                Ok(VcpuExit::Intr | VcpuExit::Hlt) => continue,
                Ok(VcpuExit::Shutdown) => "it met a fault while it handled another (triple fault)",
                Ok(other) => &format!("it stopped with {other:?}"),
                Err(error) => match io::Error::from(error).kind() {
                    // A signal: the process was stopped and goes on.
                    io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock => continue,
                    _ => &format!("KVM_RUN failed: {error}"),
                },
            };
            let _ = writeln!(self.console, "exocell: processor {}: {broken}", self.id);
            std::process::exit(DIED)
        }
    }

    fn how_it_ended(&self) -> i32 {
        match self.memory.read_obj(GuestAddress(RESET_MODE)) {
            Ok(WARM) => DIED,
            _ => ORDERLY,
        }
    }
}
