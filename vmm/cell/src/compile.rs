//! Modules and components are parsed and compiled in a jailed process, for this one the bytes and
//! the code are opaque.
//!
//! ```text
//! operator's process          `compile`, a stage              the isolate's supervisor
//! Module::read (a copy) ────> parse, check, compile
//!                       <──── module or component?
//! Code (sealed) ────────────────────────────────────────────> its jail, then loaded
//!    └ cache on disk
//! ```

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use exocell_exovisor::{
    AdmissionError, CODE_BYTES_MAX, Cache, Checked, Form, Jailed, Metering, Name, Policy, Sealed,
    TooLong, Use,
};
use exocell_images::walk::Found;
use exocell_vmm::jail::ThreadClass;
use exocell_vmm::jail::stage::{Fault, Given, Limits, Order, Stage, StageError, Task};
use exocell_xgate::CapabilitySet;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{CellError, Layout};

/// The largest module file, in bytes.
const MODULE_BYTES_MAX: u64 = 64 << 20;
/// The smallest module whose compiled form is kept, in bytes: to compile a smaller one takes
/// some ten milliseconds at most.
const CACHED_BYTES_MIN: u64 = 64 << 10;
/// What compiling may take beside a part that grows with the grant, in bytes.
const MEMORY_BYTES_MIN: u64 = 256 << 20;
/// How often a module's own memory it may take beside that.
const MEMORY_TIMES: u64 = 4;
/// Where no deadline is granted.
const TIME_MAX: Duration = Duration::from_secs(300);

/// The process in which it is done.
pub const STAGE: Stage = Stage { name: "compile", class: ThreadClass::Compile, work };

/// A copy of a module's file, in which nobody has looked.
pub struct Module {
    bytes: Sealed,
    sha256: [u8; 32],
    path: PathBuf,
}

impl Module {
    /// Copies the file `found`, which the operator calls `path`.
    ///
    /// # Errors
    /// One that cannot be read or is larger than 64 MiB.
    pub fn read(found: &Found, path: &Path) -> Result<Self, CellError> {
        let what = || format!("cannot read the module {}", path.display());
        if !found.metadata().is_file() {
            return Err(CellError::Module(format!("{} is no file", path.display())));
        }
        let file = found.file().map_err(CellError::host(what()))?;
        let mut hash = Sha256::new();
        let bytes = Sealed::copy(file, MODULE_BYTES_MAX, |piece| hash.update(piece));
        let bytes = bytes.map_err(|error| {
            match error.get_ref().is_some_and(|why| why.is::<TooLong>()) {
                true => CellError::Module(format!("{}: {error}", path.display())),
                false => CellError::host(what())(error),
            }
        })?;
        Ok(Self { bytes, sha256: hash.finalize().into(), path: path.to_owned() })
    }

    /// The hash of its bytes, in hexadecimal digits.
    #[must_use]
    pub fn sha256(&self) -> String {
        self.sha256.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Its bytes, to be handed on.
    #[must_use]
    pub fn bytes(&self) -> &Sealed {
        &self.bytes
    }

    /// Has a jailed process do something with it, within memory and time of `caps`.
    ///
    /// # Errors
    /// [`CellError`] names the module and what it says, or the bound.
    pub fn within<A: serde::de::DeserializeOwned>(
        &self,
        order: Order<'_>,
        caps: &CapabilitySet,
        deadline: Option<Instant>,
        request: &impl Serialize,
        meanwhile: impl FnOnce(),
    ) -> Result<A, CellError> {
        let memory_bytes = memory_bytes(caps);
        let answer_bytes = order.limits.answer_bytes;
        let limits = Limits {
            file_bytes: memory_bytes.min(CODE_BYTES_MAX),
            answer_bytes,
            deadline: Some(deadline.unwrap_or_else(|| Instant::now() + TIME_MAX)),
            ..Limits::of_memory(memory_bytes)
        };
        let order = Order { limits, ..order };
        let answer = order.run_while(request, meanwhile, |_| ());
        answer.map_err(|error| match error {
            StageError::Output { bytes, .. } if bytes == answer_bytes as u64 => {
                CellError::Module(format!(
                    "{}: what there is to say of it takes more than {} MiB; it imports too much, or \
                     under too long names",
                    self.path.display(),
                    bytes >> 20
                ))
            }
            error => self.explain(error, deadline.is_some()),
        })
    }

    fn explain(&self, error: StageError, is_granted: bool) -> CellError {
        let path = self.path.display();
        match error {
            StageError::Refused(words) => CellError::Module(format!("{path}: {words}")),
            StageError::Deadline { .. } if is_granted => CellError::Deadline,
            StageError::Deadline { .. } => CellError::Module(format!(
                "{path}: to compile it takes more than {} s; grant it a deadline that is longer \
                 (--timeout)",
                TIME_MAX.as_secs()
            )),
            StageError::Memory { bytes, .. } | StageError::Output { bytes, .. } => {
                CellError::Module(format!(
                    "{path}: to compile it takes more than {} MiB of memory, which is {} MiB and \
                     {MEMORY_TIMES} times what it is granted; grant it more (--memory)",
                    bytes >> 20,
                    MEMORY_BYTES_MIN >> 20
                ))
            }
            error => CellError::Module(format!("{path}: {error}")),
        }
    }
}

/// What compiling may take, beside the executable itself.
fn memory_bytes(caps: &CapabilitySet) -> u64 {
    let granted = caps.memory_bytes().unwrap_or(0);
    MEMORY_BYTES_MIN.saturating_add(granted.saturating_mul(MEMORY_TIMES))
}

/// For whom it is compiled.
#[derive(Debug)]
pub struct Build<'a> {
    /// Of whoever will load it.
    pub policy: &'a Policy,
    pub wanted: Use,
    pub metering: Metering,
    pub caps: &'a CapabilitySet,
    /// When the request has to be done; without one it has five minutes from now on.
    pub deadline: Option<Instant>,
}

/// Native code, made of hostile bytes by a process that may have been taken over. It is loaded
/// in a jail only ([`exocell_exovisor::Admission::load`]); until then nobody looks into it.
pub struct Code {
    pub file: Sealed,
    /// What the process that compiled it says it is.
    pub form: Form,
}

#[derive(Serialize, Deserialize)]
struct Request {
    policy: Policy,
    wanted: Use,
    metering: Metering,
    caps: String,
}

impl Build<'_> {
    /// Compiles `module`, or takes from the cache below `layout` what was compiled before. Either
    /// way a jailed process checks it against the grant. `meanwhile` is done while that works.
    ///
    /// # Errors
    /// [`CellError::Module`] says what is wrong with it, [`CellError::Deadline`].
    pub fn compile(
        &self,
        layout: &Layout,
        module: &Module,
        meanwhile: impl FnOnce(),
    ) -> Result<Code, CellError> {
        let Self { policy, wanted, metering, caps, deadline } = self;
        // Without one it is compiled each time.
        let cache = Some(layout.compiled()).filter(|_| module.bytes.bytes() >= CACHED_BYTES_MIN);
        let cache = cache.and_then(|dir| Cache::open(&dir).ok());
        let cache = cache.zip(Name::new(policy, *metering, wanted, module.sha256));
        let known = cache.as_ref().and_then(|(cache, name)| cache.find(name));
        let failed = || CellError::host("cannot make a file in memory");
        let output = match &known {
            Some(_) => None,
            None => Some(Sealed::empty().map_err(failed())?),
        };
        let mut given = vec![Given::file(&module.bytes)];
        given.extend(output.as_ref().map(Given::file));
        let order = Order::new(STAGE.name, given, Limits::of_memory(0));
        let request = Request {
            policy: (*policy).clone(),
            wanted: wanted.clone(),
            metering: *metering,
            caps: caps.to_json(),
        };
        let form = module.within(order, caps, *deadline, &request, meanwhile)?;
        let file = match (known, output) {
            (Some(file), _) => file,
            (None, output) => {
                let output = output.ok_or(io::ErrorKind::NotFound.into());
                let file = output.and_then(Sealed::of).map_err(failed())?;
                if let Some((cache, name)) = &cache {
                    cache.keep(name, &file);
                }
                file
            }
        };
        Ok(Code { file, form })
    }
}

/// What a stage needs to load code that another one compiled. Where that may end it, and take what
/// it has with it, is for the stage to say.
#[must_use]
pub fn jailed(_: &Task) -> Jailed {
    // SAFETY: whoever has a task is in a stage's jail (`exocell_vmm::jail::stage`): no capabilities,
    // an empty root, a filter, nothing but what it was given, which is the tenant's whose code this
    // is, or that of tenants who were put together. Needed because code that was compiled elsewhere
    // has no safe form.
    unsafe { Jailed::new() }
}

/// All of what a stage was given as its first descriptor.
///
/// # Errors
/// [`Fault`] if it cannot be read.
pub fn given_bytes(task: &mut Task) -> Result<Vec<u8>, Fault> {
    let mut bytes = Vec::new();
    File::from(task.take(0)?).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// What the stage does: checks, and compiles if it was given a place for that.
fn work(task: &mut Task) -> Result<Vec<u8>, Fault> {
    let broken = |error: &dyn std::fmt::Display| Fault::Jail(error.to_string());
    let Request { policy, wanted, metering, caps } = task.request()?;
    let caps = CapabilitySet::parse(&caps, Path::new("/")).map_err(|error| broken(&error))?;
    let bytes = given_bytes(task)?;
    let checked = Checked::new(&policy, &wanted, &bytes, &caps).map_err(refused)?;
    let form = checked.form();
    if let Ok(output) = task.take(1) {
        let compiled = checked.compile(&policy, metering).map_err(refused)?;
        // SAFETY: this process is in its jail, and has no more to lose by the code than by the
        // bytes that it was made of. Needed to find imports of a wrong type before anything runs.
        let jailed = unsafe { Jailed::new() };
        compiled.try_link(&policy, &jailed).map_err(refused)?;
        compiled.write(&File::from(output))?;
    }
    serde_json::to_vec(&form).map_err(|error| broken(&error))
}

fn refused(error: AdmissionError) -> Fault {
    let text = error.to_string();
    // What the engine says of a mapping that it was refused.
    match text.contains("os error 12") {
        true => Fault::Memory,
        false => Fault::Input(text),
    }
}
