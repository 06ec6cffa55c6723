//! The `para` platform: Linux for arch/um, run as a process without privileges.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd};

use exocell_pager::Mode;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::personality::{self, Persona};

use crate::jail::filter::{Mappable, steady};
use crate::jail::{self, PathAccess, PathGrant, ThreadClass};
use crate::platform::{
    COMMON_ARGUMENTS, DeviceSocket, GuestKernel, GuestKernelError, INITRAMFS_FILE, Image,
    KERNEL_FILE, Platform, PlatformKind, call, jail_file, keep_open,
};

/// Runs guests as processes.
#[derive(Debug)]
pub struct Para;

impl Platform for Para {
    fn kind(&self) -> PlatformKind {
        PlatformKind::Para
    }

    fn become_guest(&self, guest: &GuestKernel<'_>) -> GuestKernelError {
        match guest.confine_process() {
            Ok(calls) => guest.exec_confined(&calls),
            Err(error) => error,
        }
    }
}

impl DeviceSocket {
    /// How the guest kernel is told of the device, its `number`th.
    fn argument(&self, number: usize) -> String {
        let Self { name, id } = self;
        format!("virtio_uml.device=/{name}:{}:{number}:{}", *id as u32, id.queue_size())
    }
}

impl Image<'_> {
    /// How the guest kernel is told of it.
    fn argument(&self) -> String {
        let Self { disk, bytes, files, pieces } = self;
        let files: Vec<_> = files.iter().map(|file| file.as_raw_fd().to_string()).collect();
        let pieces: Vec<_> = pieces.iter().map(|(start, file)| format!("{start}@{file}")).collect();
        format!("image={disk}:{bytes}:{}:{}", files.join(","), pieces.join(","))
    }
}

impl GuestKernel<'_> {
    fn arguments(&self) -> Vec<String> {
        let mut arguments = vec![
            KERNEL_FILE.to_owned(),
            format!("mem={}", self.memory.bytes()),
            format!("physmem_fd={}", self.memory.file().as_raw_fd()),
            format!("ncpus={}", self.vcpus),
            format!("initrd=/{INITRAMFS_FILE}"),
            "seccomp=on".to_owned(),
            // It wants a directory for its pid file; any that exists will do.
            "uml_dir=/".to_owned(),
            "con=null".to_owned(),
            // Standard error carries the first messages and the last (a panic),
            // the virtio console all between.
            "stderr=1".to_owned(),
            // What was sent is freed with the next packet, not by an interrupt for each
            // (drivers/net/virtio_net.c, start_xmit): the device has taken it at once.
            "virtio_net.napi_tx=0".to_owned(),
        ];
        arguments.extend(COMMON_ARGUMENTS.map(str::to_owned));
        arguments.extend(self.table_arguments());
        // A kernel without the Pager would hand these words to its init.
        if self.pager != Mode::Off {
            arguments.push(format!("pager={}", self.pager));
        }
        if self.blocks {
            arguments.push("pager_blocks".to_owned());
        }
        if let Some(mappings) = self.mappings_max {
            arguments.push(format!("host_maps={mappings}"));
        }
        if let Some(lender) = self.lender {
            arguments.push(format!("pager_fd={}", lender.as_raw_fd()));
        }
        arguments.extend(self.mapped_image().iter().map(Image::argument));
        arguments.extend(self.intra.argument().map(str::to_owned));
        arguments.extend(
            self.devices.iter().enumerate().map(|(number, device)| device.argument(number)),
        );
        arguments
    }

    /// What it may call once it runs programs comes back as a file.
    fn confine_process(&self) -> Result<File, GuestKernelError> {
        self.confine()?;
        personality::set(Persona::ADDR_NO_RANDOMIZE).map_err(|errno| call("personality", errno))?;
        close_on_exec_from(3).map_err(GuestKernelError::Files)?;
        keep_open(self.memory.file())?;
        self.lender.map_or(Ok(()), keep_open)?;
        self.image_files().iter().try_for_each(keep_open)?;
        let kernel = jail_file(KERNEL_FILE)?;
        let initramfs = jail_file(INITRAMFS_FILE)?;
        jail::restrict_paths(&[
            PathGrant { at: kernel.as_fd(), access: PathAccess::Execute },
            PathGrant { at: initramfs.as_fd(), access: PathAccess::Read },
        ])?;
        let calls = self.steady_calls()?;
        jail::restrict_calls(ThreadClass::GuestKernel)?;
        Ok(calls)
    }

    /// The image, unless a descriptor that the guest kernel has besides is where it puts the
    /// image's.
    fn mapped_image(&self) -> Option<Image<'_>> {
        let memory = self.memory.file().as_raw_fd();
        let lender = self.lender.map_or(0, |lender| lender.as_raw_fd());
        self.image.filter(|_| memory.max(lender) < steady::IMAGE)
    }

    fn image_files(&self) -> &[File] {
        self.mapped_image().map_or(&[], |image| image.files)
    }

    fn steady_calls(&self) -> Result<File, GuestKernelError> {
        let memory = self.memory.file().as_raw_fd();
        let files = Mappable { memory, image_files: self.image_files().len() };
        let program = steady::program(self.intra, self.pager != Mode::Off, files)?;
        let mut file = memfd_create(c"calls", MFdFlags::MFD_ALLOW_SEALING)
            .map(File::from)
            .map_err(|errno| call("memfd_create", errno))?;
        file.write_all(&program).map_err(GuestKernelError::Files)?;
        let seals = nix::fcntl::SealFlag::all();
        nix::fcntl::fcntl(&file, nix::fcntl::FcntlArg::F_ADD_SEALS(seals))
            .map_err(|errno| call("fcntl", errno))?;
        Ok(file)
    }

    fn exec_confined(&self, calls: &File) -> GuestKernelError {
        let text = |argument: String| CString::new(argument).unwrap_or_default();
        let mut arguments = self.arguments();
        // Before what takes descriptors of its own: this one is closed when it is read.
        arguments.insert(1, format!("calls_fd={}", calls.as_raw_fd()));
        let arguments: Vec<CString> = arguments.into_iter().map(text).collect();
        let path = text(format!("/{KERNEL_FILE}"));
        // The guest kernel finds the top of its address space by its highest
        // environment string (arch/um: get_top_address).
        let environment = [text("HOME=/".to_owned())];
        match nix::unistd::execve(&path, &arguments, &environment) {
            Ok(never) => match never {},
            Err(errno) => call("execve", errno),
        }
    }
}

/// Marks every descriptor from `first` on to be closed by execve(2).
fn close_on_exec_from(first: libc::c_uint) -> io::Result<()> {
    let flags = libc::CLOSE_RANGE_CLOEXEC as libc::c_int;
    // SAFETY: close_range takes integers; with CLOEXEC it closes nothing now,
    // so no owner's descriptor goes away under it. Needed because nix does not
    // wrap it.
    match unsafe { libc::close_range(first, libc::c_uint::MAX, flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
