//! The `kvm` platform: a virtual machine of the host's KVM, with an ordinary x86-64 kernel.
//!
//! ```text
//! child of the supervisor -> machine, memory (memory.rs) -> kernel, init (boot.rs)
//!    -> devices: registers (mmio.rs) before vhost-user (frontend.rs) -> processors (cpu.rs)
//!    -> the list of calls for machines -> a thread for each processor (vcpu.rs)
//! ```
//! The devices' back ends are those of `para`, in the supervisor; this process has the registers by
//! which the guest finds them, and no part in what goes through their queues. Its list of calls
//! (`ThreadClass::Machine`) has one ioctl: KVM_RUN. A pause is a stop of the process, and a forced
//! end its death, as for every guest.
//!
//! Not here yet: the Pager and its credit, snapshots. The process begins as a copy of its caller,
//! whose memory it keeps: a caller that holds secrets wants a program of its own for it first, and
//! cells with secrets are refused.

mod boot;
mod bus;
mod cpu;
mod error;
mod frontend;
mod memory;
mod mmio;
mod mptable;
mod msr;
mod vcpu;

use std::convert::Infallible;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use exocell_pager::Mode;
use kvm_bindings::{KVM_PIT_SPEAKER_DUMMY, kvm_pit_config};
use kvm_ioctls::{Cap, Kvm};

pub use error::KvmError;

use crate::intra::Intra;
use crate::jail::{self, ThreadClass};
use crate::platform::{
    COMMON_ARGUMENTS, GuestKernel, GuestKernelError, INITRAMFS_FILE, KERNEL_FILE, Platform,
    PlatformKind, call, close_all_but, jail_file,
};

/// The version of the interface; it has been this one since 2007.
const VERSION: i32 = 12;
/// What has to be there.
const NEEDED: [(Cap, &str); 7] = [
    (Cap::UserMemory, "memory slots"),
    (Cap::Irqchip, "interrupt controllers"),
    (Cap::Pit2, "a timer"),
    (Cap::Ioeventfd, "doorbells (ioeventfd)"),
    (Cap::Irqfd, "interrupts by events (irqfd)"),
    (Cap::ExtCpuid, "a processor's features"),
    (Cap::X86MsrFilter, "a filter of a processor's registers (Linux 5.10)"),
];

/// Runs guests by the host's KVM.
pub struct KvmPlatform {
    kvm: Kvm,
}

impl KvmPlatform {
    /// Opens KVM, in the operator's name: a jail has no way to it.
    ///
    /// # Errors
    /// [`KvmError::Unusable`]: it is absent, or no processor of the host runs guests.
    pub fn open() -> Result<Self, KvmError> {
        crate::host::kvm().map_err(KvmError::Unusable)?;
        let kvm = Kvm::new().map_err(|error| KvmError::Unusable(error.to_string()))?;
        if kvm.get_api_version() != VERSION {
            return Err(KvmError::Unusable("it has another interface than Linux".to_owned()));
        }
        let missing = NEEDED.iter().find(|(cap, _)| !kvm.check_extension(*cap));
        match missing {
            Some((_, what)) => Err(KvmError::Unusable(format!("it lacks {what}"))),
            None => Ok(Self { kvm }),
        }
    }

    /// What guests cannot be asked for, by the name of what asks.
    ///
    /// # Errors
    /// The first of it, and what to do.
    pub fn check(pager: Mode, intra: Intra) -> Result<(), String> {
        if pager != Mode::Off {
            return Err(format!(
                "--pager {pager} is not there on the kvm platform yet; choose --pager off, or \
                 the platform para"
            ));
        }
        if intra != Intra::Aspace {
            return Err(format!(
                "--intra {intra} is not there on the kvm platform, whose programs have address \
                 spaces of the processor; choose --intra aspace, or the platform para"
            ));
        }
        Ok(())
    }

    fn run(&self, guest: &GuestKernel<'_>) -> Result<Infallible, GuestKernelError> {
        Self::check(guest.pager, guest.intra).map_err(KvmError::NotThere)?;
        guest.confine()?;
        // The supervisor's are not the guest's: its record, its disks, the folders of the host.
        let (kvm, memory) = (self.kvm.as_raw_fd(), guest.memory.file().as_raw_fd());
        close_all_but(&[kvm, memory, guest.console.as_raw_fd()])
            .map_err(GuestKernelError::Files)?;
        nix::sys::prctl::set_name(c"exocell-kvm").map_err(|errno| call("prctl", errno))?;
        let machine = self.machine(guest)?;
        // Nothing is opened by a path from here on.
        jail::restrict_paths(&[])?;
        jail::restrict_calls(ThreadClass::Machine)?;
        Ok(machine.run()?)
    }

    fn machine(&self, guest: &GuestKernel<'_>) -> Result<vcpu::Machine, GuestKernelError> {
        let vm = self.kvm.create_vm().map_err(KvmError::call("KVM_CREATE_VM"))?;
        let memory = memory::map(guest.memory)?;
        memory::give(&vm, &memory)?;
        vm.create_irq_chip().map_err(KvmError::call("KVM_CREATE_IRQCHIP"))?;
        let timer = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..kvm_pit_config::default() };
        vm.create_pit2(timer).map_err(KvmError::call("KVM_CREATE_PIT2"))?;
        msr::filter(&vm)?;
        let vcpus = u8::try_from(guest.vcpus).unwrap_or(u8::MAX);
        let (mut kernel, initramfs) = (jail_file(KERNEL_FILE)?, jail_file(INITRAMFS_FILE)?);
        let entry = boot::load(&memory, &mut kernel, &initramfs, &arguments(guest), vcpus)?;
        let regions = memory::regions(&memory);
        let devices = (0..).zip(guest.devices);
        let devices = devices
            .map(|(number, socket)| frontend::attach(&vm, &regions, socket, number))
            .collect::<Result<Vec<_>, _>>()?;
        let offered = cpu::offered(&self.kvm)?;
        let mut processors = Vec::new();
        for id in 0..vcpus {
            let vcpu = vm.create_vcpu(id.into()).map_err(KvmError::call("KVM_CREATE_VCPU"))?;
            cpu::set_up(&vcpu, &offered, (id, vcpus), entry)?;
            processors.push(vcpu);
        }
        let console = guest.console.try_clone_to_owned().map_err(GuestKernelError::Files)?;
        Ok(vcpu::Machine {
            vm,
            memory,
            processors,
            bus: Arc::new(bus::Bus::new(devices)),
            console: File::from(console),
        })
    }
}

impl Platform for KvmPlatform {
    fn kind(&self) -> PlatformKind {
        PlatformKind::Kvm
    }

    fn become_guest(&self, guest: &GuestKernel<'_>) -> GuestKernelError {
        match self.run(guest) {
            Ok(never) => match never {},
            Err(error) => error,
        }
    }
}

fn arguments(guest: &GuestKernel<'_>) -> Vec<String> {
    let mut arguments = vec![
        // First words, until the console is there, which says them once more.
        "earlycon=uart8250,io,0x3f8".to_owned(),
        // The end is a start, which is this process's end; one after a panic says so (vcpu.rs).
        "reboot=k,cold,panic_warm".to_owned(),
        // No clock is better than KVM's.
        "no_timer_check".to_owned(),
    ];
    arguments.extend(COMMON_ARGUMENTS.map(str::to_owned));
    arguments.extend(guest.table_arguments());
    arguments.extend((0..guest.devices.len()).map(frontend::argument));
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_refused_by_name() {
        KvmPlatform::check(Mode::Off, Intra::Aspace).unwrap();
        let refused = KvmPlatform::check(Mode::Credit, Intra::Aspace).unwrap_err();
        assert!(refused.contains("--pager credit") && refused.contains("--pager off"), "{refused}");
        let refused = KvmPlatform::check(Mode::Off, Intra::Mpk).unwrap_err();
        assert!(refused.contains("--intra mpk") && refused.contains("aspace"), "{refused}");
    }
}
