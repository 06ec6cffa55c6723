//! What this host offers to cells, found by trying it.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use kvm_bindings::{KVM_MEM_LOG_DIRTY_PAGES, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit};
use serde::Serialize;

use crate::jail::{self, IdentityMap};

/// One feature of the host.
#[derive(Debug, Clone, Serialize)]
pub struct Feature {
    pub name: &'static str,
    pub usable: bool,
    /// What was found; where it is lacking, what that costs and what helps.
    pub why: String,
    /// No cell runs without it.
    pub required: bool,
}

/// Tries every feature. The caller must have one thread.
pub fn probe() -> Vec<Feature> {
    vec![
        feature("user_namespaces", true, user_namespaces()),
        feature("seccomp", true, seccomp()),
        feature("memfd", true, memfd()),
        feature("mkfs_ext4", true, mkfs_ext4()),
        feature("landlock", false, landlock()),
        feature("mpk", false, mpk()),
        feature("kvm", false, kvm()),
        feature("max_map_count", false, max_map_count()),
        feature("memory_control_group", false, jail::group::offered()),
        feature("memory_blocks", false, exocell_pager::blocks::offered()),
    ]
}

fn feature(name: &'static str, required: bool, found: Result<String, String>) -> Feature {
    let (usable, why) = match found {
        Ok(why) => (true, why),
        Err(why) => (false, why),
    };
    Feature { name, usable, why, required }
}

fn user_namespaces() -> Result<String, String> {
    let map = IdentityMap::for_caller();
    let spawned =
        jail::spawn(map, jail::HostNetwork::Never, |_| 0).map_err(|error| error.to_string())?;
    let pid = nix::unistd::Pid::from_raw(spawned.pid);
    nix::sys::wait::waitpid(pid, None).map_err(|errno| errno.to_string())?;
    Ok(match map {
        IdentityMap::CallerAndCell | IdentityMap::Everyone => {
            "guest kernels get an id of their own".to_owned()
        }
        IdentityMap::CallerOnly => {
            "guest kernels share the caller's id; run as root for one each".to_owned()
        }
    })
}

fn seccomp() -> Result<String, String> {
    let actions = fs::read_to_string("/proc/sys/kernel/seccomp/actions_avail").map_err(|_| {
        "the host's kernel lacks CONFIG_SECCOMP_FILTER; no cell can be confined".to_owned()
    })?;
    if !actions.split_whitespace().any(|action| action == "user_notif") || !killable_notifications()
    {
        return Err("filters cannot notify, or interrupts cancel notifications; \
             the para platform needs Linux 5.19 or newer"
            .to_owned());
    }
    Ok("filters can notify".to_owned())
}

/// Whether the host knows `SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV` (Linux 5.19).
fn killable_notifications() -> bool {
    let flags =
        libc::SECCOMP_FILTER_FLAG_NEW_LISTENER | libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV;
    let no_filter = std::ptr::null::<libc::c_void>();
    // SAFETY: unknown flags fail with EINVAL, known ones with EFAULT for the
    // null pointer; neither installs anything. Needed to tell the two apart.
    unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, no_filter) };
    nix::errno::Errno::last() == nix::errno::Errno::EFAULT
}

fn memfd() -> Result<String, String> {
    crate::memory::GuestMemory::new(4096)
        .map(|_| "guest memory is a sealed memory file".to_owned())
        .map_err(|error| format!("memory files do not work ({error}); guest memory needs them"))
}

fn mkfs_ext4() -> Result<String, String> {
    let places = ["/usr/sbin/mkfs.ext4", "/sbin/mkfs.ext4", "/usr/bin/mkfs.ext4"];
    match places.iter().find(|place| Path::new(place).exists()) {
        Some(place) => Ok((*place).to_owned()),
        None => {
            Err("mkfs.ext4 is missing; apt install e2fsprogs (only --read-only cells run without)"
                .to_owned())
        }
    }
}

fn landlock() -> Result<String, String> {
    match jail::landlock_abi() {
        Some(version) => Ok(format!("interface version {version}")),
        None => Err(
            "absent; the empty root is then the only file system barrier (boot with lsm=landlock)"
                .to_owned(),
        ),
    }
}

fn mpk() -> Result<String, String> {
    protection_keys()
        .map_err(|why| format!("{why}; intra-cell mode mpk is off, Wasm slots use guard regions"))
}

/// Whether guest kernels can have keys for their memory: keys, and a host that writes
/// signal frames to memory that has one (Linux 6.12).
///
/// # Errors
///
/// What is missing.
pub fn protection_keys() -> Result<String, String> {
    const WANTED: (u32, u32) = (6, 12);
    // SAFETY: pkey_alloc takes two integers and touches no memory.
    let key = unsafe { libc::syscall(libc::SYS_pkey_alloc, 0, 0) };
    if key < 0 {
        return Err("this machine has no memory protection keys".to_owned());
    }
    // SAFETY: frees the key that was just allocated; it is on no page.
    unsafe { libc::syscall(libc::SYS_pkey_free, key) };
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    if version(&release) < Some(WANTED) {
        return Err(format!(
            "there are memory protection keys, but the host is Linux {}; 6.12 is needed",
            release.trim()
        ));
    }
    Ok("memory protection keys can be allocated".to_owned())
}

/// The first two numbers of a kernel release.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.trim().split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// Mappings that a process may have (vm.max_map_count); `None` where the host does not say.
#[must_use]
pub fn mappings_max() -> Option<u64> {
    fs::read_to_string("/proc/sys/vm/max_map_count").ok()?.trim().parse().ok()
}

fn max_map_count() -> Result<String, String> {
    const WANTED: u64 = 262_144;
    match mappings_max() {
        Some(count) if count >= WANTED => Ok(format!("{count}")),
        Some(count) => Err(format!(
            "{count}; what a guest process has in more than some {} MiB of single pages is mapped \
             again and again, and isolates end at {}; sysctl vm.max_map_count={WANTED}",
            count * 4 / 1024,
            count / 2
        )),
        None => Err("cannot be read".to_owned()),
    }
}

/// A device node is not enough: where the host itself runs without hardware
/// virtualization, KVM may interpret guest kernel code, hundreds of times
/// slower. A counted loop in ring 0 tells the two apart.
///
/// # Errors
/// What was found instead.
pub fn kvm() -> Result<String, String> {
    let elapsed = kvm_loop()?;
    let limit = Duration::from_millis(20);
    if elapsed < limit {
        Ok(format!("{LOOP_ITERATIONS} iterations in ring 0 took {elapsed:?}"))
    } else {
        Err(format!(
            "emulated: {LOOP_ITERATIONS} iterations in ring 0 took {elapsed:?} (hardware: below 1 ms); \
             the para platform is used"
        ))
    }
}

const LOOP_ITERATIONS: u32 = 50_000;
/// A busy host may take its processor away for longer than the loop takes; the fastest counts.
const LOOP_TRIES: usize = 5;

fn kvm_loop() -> Result<Duration, String> {
    const GUEST_ADDRESS: u64 = 0x1000;
    const PAGE: usize = 4096;
    let absent = |error: kvm_ioctls::Error| format!("absent ({error}); the para platform is used");
    let kvm = Kvm::new().map_err(absent)?;
    let vm = kvm.create_vm().map_err(absent)?;
    let mut page = Page([0; PAGE]);
    // mov ecx, LOOP_ITERATIONS; again: dec ecx; jnz again; hlt (16-bit mode)
    let mut code = vec![0x66, 0xb9];
    code.extend_from_slice(&LOOP_ITERATIONS.to_le_bytes());
    code.extend_from_slice(&[0x66, 0x49, 0x75, 0xfc, 0xf4]);
    page.0[..code.len()].copy_from_slice(&code);
    let region = kvm_userspace_memory_region {
        slot: 0,
        flags: KVM_MEM_LOG_DIRTY_PAGES,
        guest_phys_addr: GUEST_ADDRESS,
        memory_size: PAGE as u64,
        userspace_addr: page.0.as_mut_ptr() as u64,
    };
    // SAFETY: the region is one whole page of ours that outlives the guest:
    // `page` is dropped after `vm`'s last use below. Needed to give the probe
    // code to a guest.
    unsafe { vm.set_user_memory_region(region) }.map_err(absent)?;
    let mut vcpu = vm.create_vcpu(0).map_err(absent)?;
    let mut sregs = vcpu.get_sregs().map_err(absent)?;
    sregs.cs.base = 0;
    sregs.cs.selector = 0;
    vcpu.set_sregs(&sregs).map_err(absent)?;
    let mut fastest = Duration::MAX;
    for _ in 0..LOOP_TRIES {
        let mut regs = vcpu.get_regs().map_err(absent)?;
        regs.rip = GUEST_ADDRESS;
        regs.rflags = 2;
        vcpu.set_regs(&regs).map_err(absent)?;
        let start = Instant::now();
        let exit = vcpu.run().map_err(absent)?;
        fastest = fastest.min(start.elapsed());
        if !matches!(exit, VcpuExit::Hlt) {
            return Err(format!(
                "the probe guest stopped with {exit:?}; the para platform is used"
            ));
        }
    }
    Ok(fastest)
}

#[repr(align(4096))]
struct Page([u8; 4096]);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_the_first_two_numbers() {
        assert_eq!(version("6.12.113+deb12-cloud-amd64\n"), Some((6, 12)));
        assert_eq!(version("7.2-rc1"), Some((7, 2)));
        assert_eq!(version("unknown"), None);
        assert!(version("6.9.1") < Some((6, 12)) && version("") < Some((6, 12)));
    }

    #[test]
    fn every_feature_has_a_name_and_a_reason() {
        for feature in [
            feature("seccomp", true, seccomp()),
            feature("mpk", false, mpk()),
            feature("kvm", false, kvm()),
            feature("max_map_count", false, max_map_count()),
            feature("memory_blocks", false, exocell_pager::blocks::offered()),
        ] {
            assert!(!feature.name.is_empty() && !feature.why.is_empty(), "{feature:?}");
        }
    }
}
