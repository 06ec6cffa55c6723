//! Folders and files, each call behind the gate: a handle has the token of the folder it came
//! from, so revoking a folder acts on what is open.

use super::streams::Guarded;
use super::wasi::Wasi;
use exocell_xgate::Live;
use wasmtime::Result;
use wasmtime::component::Resource;
use wasmtime_wasi::filesystem::WasiFilesystemView as _;
use wasmtime_wasi::p2::bindings::filesystem::preopens;
use wasmtime_wasi::p2::bindings::filesystem::types::{
    self, Advice, Descriptor, DescriptorFlags, DescriptorStat, DescriptorType, DirectoryEntry,
    DirectoryEntryStream, ErrorCode, Filesize, HostDescriptor, HostDirectoryEntryStream,
    MetadataHashValue, NewTimestamp, OpenFlags, PathFlags,
};
use wasmtime_wasi::p2::{DynInputStream, DynOutputStream, FsError, FsResult};

type Fd = Resource<Descriptor>;

impl Wasi {
    /// The token behind an open handle. Each has one, since all come from folders.
    ///
    /// # Errors
    /// `not-permitted` once it was revoked.
    fn permit<T>(&self, handle: &Resource<T>) -> FsResult<Live> {
        let live = self.handles.get(&handle.rep()).filter(|live| live.is_live());
        live.cloned().ok_or_else(|| ErrorCode::NotPermitted.into())
    }

    /// A handle was opened through one with the token `live`.
    fn opened<T>(&mut self, handle: &Resource<T>, live: Live) {
        self.handles.insert(handle.rep(), live);
    }

    fn closed<T>(&mut self, handle: &Resource<T>) {
        self.handles.remove(&handle.rep());
    }

    /// Puts a stream of a file behind the token of its folder.
    fn guard<S: Send + 'static>(
        &mut self,
        handle: Resource<S>,
        live: Live,
        boxed: impl Fn(Guarded<S>) -> S,
    ) -> FsResult<Resource<S>> {
        let stream = self.table.delete(handle)?;
        Ok(self.table.push(boxed(Guarded { stream, live }))?)
    }
}

impl preopens::Host for Wasi {
    fn get_directories(&mut self) -> Result<Vec<(Fd, String)>> {
        let directories = preopens::Host::get_directories(&mut self.filesystem())?;
        for ((handle, _), live) in directories.iter().zip(self.folders.clone()) {
            self.opened(handle, live);
        }
        Ok(directories)
    }
}

impl types::Host for Wasi {
    fn convert_error_code(&mut self, error: FsError) -> Result<ErrorCode> {
        self.filesystem().convert_error_code(error)
    }

    fn filesystem_error_code(
        &mut self,
        error: Resource<wasmtime::Error>,
    ) -> Result<Option<ErrorCode>> {
        self.filesystem().filesystem_error_code(error)
    }
}

/// Defines methods that are wasmtime-wasi's once the handle is permitted.
macro_rules! permitted {
    ($($name:ident($($arg:ident: $type:ty),*) -> $result:ty;)*) => {$(
        async fn $name(&mut self, fd: Fd, $($arg: $type),*) -> FsResult<$result> {
            self.permit(&fd)?;
            HostDescriptor::$name(&mut self.filesystem(), fd, $($arg),*).await
        }
    )*};
}

impl HostDescriptor for Wasi {
    permitted! {
        advise(offset: Filesize, length: Filesize, advice: Advice) -> ();
        sync_data() -> ();
        get_flags() -> DescriptorFlags;
        get_type() -> DescriptorType;
        set_size(size: Filesize) -> ();
        set_times(accessed: NewTimestamp, modified: NewTimestamp) -> ();
        read(length: Filesize, offset: Filesize) -> (Vec<u8>, bool);
        write(bytes: Vec<u8>, offset: Filesize) -> Filesize;
        sync() -> ();
        create_directory_at(path: String) -> ();
        stat() -> DescriptorStat;
        stat_at(flags: PathFlags, path: String) -> DescriptorStat;
        set_times_at(flags: PathFlags, path: String, accessed: NewTimestamp, modified: NewTimestamp) -> ();
        readlink_at(path: String) -> String;
        remove_directory_at(path: String) -> ();
        symlink_at(target: String, path: String) -> ();
        unlink_file_at(path: String) -> ();
        metadata_hash() -> MetadataHashValue;
        metadata_hash_at(flags: PathFlags, path: String) -> MetadataHashValue;
    }

    async fn link_at(
        &mut self,
        from: Fd,
        flags: PathFlags,
        old: String,
        to: Fd,
        new: String,
    ) -> FsResult<()> {
        self.permit(&from)?;
        self.permit(&to)?;
        self.filesystem().link_at(from, flags, old, to, new).await
    }

    async fn rename_at(&mut self, from: Fd, old: String, to: Fd, new: String) -> FsResult<()> {
        self.permit(&from)?;
        self.permit(&to)?;
        self.filesystem().rename_at(from, old, to, new).await
    }

    async fn open_at(
        &mut self,
        fd: Fd,
        flags: PathFlags,
        path: String,
        open: OpenFlags,
        rights: DescriptorFlags,
    ) -> FsResult<Fd> {
        let live = self.permit(&fd)?;
        let opened = self.filesystem().open_at(fd, flags, path, open, rights).await?;
        self.opened(&opened, live);
        Ok(opened)
    }

    async fn read_directory(&mut self, fd: Fd) -> FsResult<Resource<DirectoryEntryStream>> {
        let live = self.permit(&fd)?;
        let entries = self.filesystem().read_directory(fd).await?;
        self.opened(&entries, live);
        Ok(entries)
    }

    fn read_via_stream(&mut self, fd: Fd, offset: Filesize) -> FsResult<Resource<DynInputStream>> {
        let live = self.permit(&fd)?;
        let handle = self.filesystem().read_via_stream(fd, offset)?;
        self.guard(handle, live, |guarded| Box::new(guarded))
    }

    fn write_via_stream(
        &mut self,
        fd: Fd,
        offset: Filesize,
    ) -> FsResult<Resource<DynOutputStream>> {
        let live = self.permit(&fd)?;
        let handle = self.filesystem().write_via_stream(fd, offset)?;
        self.guard(handle, live, |guarded| Box::new(guarded))
    }

    fn append_via_stream(&mut self, fd: Fd) -> FsResult<Resource<DynOutputStream>> {
        let live = self.permit(&fd)?;
        let handle = self.filesystem().append_via_stream(fd)?;
        self.guard(handle, live, |guarded| Box::new(guarded))
    }

    async fn is_same_object(&mut self, one: Fd, other: Fd) -> Result<bool> {
        if self.permit(&one).is_err() || self.permit(&other).is_err() {
            return Ok(false);
        }
        self.filesystem().is_same_object(one, other).await
    }

    fn drop(&mut self, fd: Fd) -> Result<()> {
        self.closed(&fd);
        HostDescriptor::drop(&mut self.filesystem(), fd)
    }
}

impl HostDirectoryEntryStream for Wasi {
    async fn read_directory_entry(
        &mut self,
        entries: Resource<DirectoryEntryStream>,
    ) -> FsResult<Option<DirectoryEntry>> {
        self.permit(&entries)?;
        self.filesystem().read_directory_entry(entries).await
    }

    fn drop(&mut self, entries: Resource<DirectoryEntryStream>) -> Result<()> {
        self.closed(&entries);
        HostDirectoryEntryStream::drop(&mut self.filesystem(), entries)
    }
}
