//! WASI-NN (`wasi_ephemeral_nn`): models that the capability table names, and no others.
//!
//! Guests bring no models: what `load` would take is refused. A model is read and bounded when
//! the isolate is made ready ([`exocell_models`]), and computed on a thread for that purpose, or
//! the isolate's own; of all isolates no more compute at once than there are processors. Its
//! run ends with the isolate, between two operators, and its CPU time is the call's.

use crate::hostcalls::context::{HostState, Waits};
use crate::hostcalls::state::State;
use crate::hostcalls::{Host, ended, host_state};
use crate::imports::NN;
use crate::preempt::cancel::{CancelHandle, Meter};
use exocell_models::{Element, Ended, Form, MODEL_BYTES_MAX, Model, ModelError};
use exocell_xgate::{Capability, Live, Scope};
use nix::fcntl::{AT_FDCWD, OFlag, OpenHow, ResolveFlag, openat2};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;
use tokio::sync::Semaphore;
use wasmtime::{Caller, Linker, Result};
use wiggle::{GuestMemory, GuestPtr};

/// Graphs of one isolate that are loaded.
const GRAPHS_MAX: usize = 64;
/// Contexts of one isolate: each keeps inputs and outputs.
const CONTEXTS_MAX: usize = 8;
const NAME_BYTES_MAX: u32 = 256;
const DIMENSIONS_MAX: u32 = 8;

/// `nn_errno` of WASI-NN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    InvalidArgument = 1,
    MissingMemory = 3,
    RuntimeError = 5,
    UnsupportedOperation = 6,
    TooLarge = 7,
    NotFound = 8,
}

/// Models that were read. Clones share them: a file is read once, until it changes.
#[derive(Clone, Debug, Default)]
pub struct Models(Arc<Mutex<Known>>);

/// Models by their files.
type Known = BTreeMap<PathBuf, (Stamp, Arc<Model>)>;

/// When a file was changed, and its length.
type Stamp = (Option<SystemTime>, u64);

/// Why a model cannot be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReadError {
    #[error(transparent)]
    Host(#[from] std::io::Error),
    #[error(transparent)]
    Model(#[from] ModelError),
}

impl Models {
    fn read(&self, path: &Path, file: File) -> Result<Arc<Model>, ReadError> {
        let about = file.metadata()?;
        let stamp = (about.modified().ok(), about.len());
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, model)) = known.get(path).filter(|(known, _)| *known == stamp) {
            return Ok(Arc::clone(model));
        }
        let mut bytes = Vec::new();
        file.take(MODEL_BYTES_MAX as u64 + 1).read_to_end(&mut bytes)?;
        let model = Arc::new(Model::read(&bytes)?);
        known.insert(path.to_owned(), (stamp, Arc::clone(&model)));
        Ok(model)
    }
}

/// The file of a granted model, opened and not yet looked into.
pub(crate) struct Unread {
    name: String,
    path: PathBuf,
    file: File,
    live: Live,
}

impl Unread {
    /// The model of a capability, if it is one.
    pub fn open(capability: &Capability) -> Result<Option<Self>, ReadError> {
        let (Scope::File(path), Some((_, name))) =
            (capability.scope(), capability.name().split_once(':'))
        else {
            return Ok(None);
        };
        // A device or a pipe may have no end, or block when it is opened. The path was found by
        // whoever granted it, so a link in it was made since, by somebody else.
        let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        let how = OpenHow::new().flags(flags).resolve(ResolveFlag::RESOLVE_NO_SYMLINKS);
        let file = File::from(openat2(AT_FDCWD, path, how).map_err(std::io::Error::from)?);
        if !file.metadata()?.is_file() {
            return Err(ReadError::Host(std::io::Error::other("it is no file")));
        }
        let (name, path) = (name.to_owned(), path.clone());
        Ok(Some(Self { name, path, file, live: capability.live() }))
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// What an isolate may compute, and what it has begun.
pub(crate) struct Inference {
    granted: BTreeMap<String, Granted>,
    graphs: Vec<String>,
    contexts: Vec<Context>,
    waits: Waits,
}

#[derive(Clone)]
struct Granted {
    model: Arc<Model>,
    live: Live,
}

struct Context {
    graph: String,
    inputs: Vec<Option<Vec<u8>>>,
    outputs: Vec<Vec<u8>>,
}

impl Inference {
    pub fn new(waits: Waits) -> Self {
        Self { granted: BTreeMap::new(), graphs: Vec::new(), contexts: Vec::new(), waits }
    }

    /// Reads a model and makes it ready.
    pub fn grant(&mut self, models: &Models, unread: Unread) -> Result<(), ReadError> {
        let Unread { name, path, file, live } = unread;
        self.granted.insert(name, Granted { model: models.read(&path, file)?, live });
        Ok(())
    }

    /// The model of a name, as long as its capability holds.
    fn model(&self, name: &str) -> Result<&Arc<Model>, Refusal> {
        let granted = self.granted.get(name).filter(|granted| granted.live.is_live());
        granted.map(|granted| &granted.model).ok_or(Refusal::NotFound)
    }

    fn load(&mut self, name: String) -> Result<u32, Refusal> {
        self.model(&name)?;
        if self.graphs.len() >= GRAPHS_MAX {
            return Err(Refusal::TooLarge);
        }
        self.graphs.push(name);
        Ok(self.graphs.len() as u32 - 1)
    }

    fn begin(&mut self, graph: u32) -> Result<u32, Refusal> {
        let graph = self.graphs.get(graph as usize).ok_or(Refusal::InvalidArgument)?.clone();
        let inputs = vec![None; self.model(&graph)?.inputs().len()];
        if self.contexts.len() >= CONTEXTS_MAX {
            return Err(Refusal::TooLarge);
        }
        self.contexts.push(Context { graph, inputs, outputs: Vec::new() });
        Ok(self.contexts.len() as u32 - 1)
    }

    fn context(&mut self, context: u32) -> Result<&mut Context, Refusal> {
        self.contexts.get_mut(context as usize).ok_or(Refusal::InvalidArgument)
    }

    fn set_input(
        &mut self,
        context: u32,
        index: u32,
        tensor: u32,
        memory: &GuestMemory<'_>,
    ) -> Result<(), Refusal> {
        let graph = self.context(context)?.graph.clone();
        let forms = self.model(&graph)?.inputs();
        let form = forms.get(index as usize).ok_or(Refusal::InvalidArgument)?;
        let bytes = read_tensor(memory, tensor, form)?;
        if let Some(input) = self.context(context)?.inputs.get_mut(index as usize) {
            *input = Some(bytes);
        }
        Ok(())
    }

    fn output(&mut self, context: u32, index: u32) -> Result<&[u8], Refusal> {
        let output = self.context(context)?.outputs.get(index as usize);
        output.map(Vec::as_slice).ok_or(Refusal::InvalidArgument)
    }

    async fn compute(&mut self, context: u32, cancel: &CancelHandle) -> Result<(), Refusal> {
        let Context { graph, inputs, .. } = self.context(context)?;
        let inputs: Option<Vec<Vec<u8>>> = inputs.iter().cloned().collect();
        let (inputs, graph) = (inputs.ok_or(Refusal::InvalidArgument)?, graph.clone());
        let model = Arc::clone(self.model(&graph)?);
        let cancel = cancel.clone();
        let ran = match self.waits {
            Waits::Here => model.run(&inputs, || cancel.is_over()),
            Waits::Elsewhere => {
                // It is never closed.
                let permit = computing().acquire().await.map_err(|_| Refusal::RuntimeError)?;
                let run = move || {
                    let (meter, _permit) = (Meter::start(cancel), permit);
                    model.run(&inputs, || meter.is_over())
                };
                let ran = tokio::task::spawn_blocking(run).await;
                ran.map_err(|_| Refusal::RuntimeError)?
            }
        };
        self.context(context)?.outputs = ran.map_err(|ended| match ended {
            Ended::Inputs => Refusal::InvalidArgument,
            Ended::Stopped | Ended::Failed(_) => Refusal::RuntimeError,
        })?;
        Ok(())
    }
}

/// One permit for each processor.
fn computing() -> &'static Semaphore {
    static COMPUTING: std::sync::OnceLock<Semaphore> = std::sync::OnceLock::new();
    COMPUTING
        .get_or_init(|| Semaphore::new(std::thread::available_parallelism().map_or(1, Into::into)))
}

/// The bytes of a guest's tensor, which must be what the model takes.
fn read_tensor(memory: &GuestMemory<'_>, at: u32, form: &Form) -> Result<Vec<u8>, Refusal> {
    // The last word's end is an address, so none of them wraps.
    at.checked_add(20).ok_or(Refusal::MissingMemory)?;
    let [dims, count, ty, data, len] = [0, 4, 8, 12, 16].map(|offset| at + offset);
    let word = |at| memory.read(GuestPtr::<u32>::new(at)).map_err(|_| Refusal::MissingMemory);
    let count = word(count)?;
    if count > DIMENSIONS_MAX {
        return Err(Refusal::InvalidArgument);
    }
    let dims = GuestPtr::<[u32]>::new((word(dims)?, count));
    let dims = memory.to_vec(dims).map_err(|_| Refusal::MissingMemory)?;
    let ty = memory.read(GuestPtr::<u8>::new(ty)).map_err(|_| Refusal::MissingMemory)?;
    let same = dims.iter().map(|dim| *dim as usize).eq(form.dims.iter().copied());
    if !same || element(ty) != Some(form.element) {
        return Err(Refusal::InvalidArgument);
    }
    let (data, len) = (word(data)?, word(len)?);
    if len as usize != form.bytes() {
        return Err(Refusal::InvalidArgument);
    }
    let bytes = memory.as_cow(GuestPtr::<[u8]>::new((data, len)));
    Ok(bytes.map_err(|_| Refusal::MissingMemory)?.into_owned())
}

/// `tensor_type` of WASI-NN.
fn element(ty: u8) -> Option<Element> {
    match ty {
        1 => Some(Element::F32),
        2 => Some(Element::F64),
        3 => Some(Element::U8),
        4 => Some(Element::I32),
        5 => Some(Element::I64),
        _ => None,
    }
}

/// What a call asks for, with the arguments as they come.
#[derive(Clone, Copy)]
enum Ask {
    Load,
    LoadByName([i32; 3]),
    Begin([i32; 2]),
    SetInput([i32; 3]),
    Compute(i32),
    Output([i32; 5]),
}

/// Defines the names of this module.
pub(crate) fn link(linker: &mut Linker<State>) -> Result<()> {
    macro_rules! define {
        ($($name:literal ($($arg:ident),*) => $ask:expr;)*) => {$(
            linker.func_wrap_async(
                NN,
                $name,
                #[allow(unused_parens)]
                |caller: Caller<'_, State>, ($($arg,)*): ($(define!(@$arg),)*)| {
                    $(let _ = $arg;)*
                    Box::new(answer(caller, $ask))
                },
            )?;
        )*};
        (@$arg:ident) => { i32 };
    }
    define! {
        "load" (builders, count, encoding, target, out) => Ask::Load;
        "load_by_name" (name, len, out) => Ask::LoadByName([name, len, out]);
        "init_execution_context" (graph, out) => Ask::Begin([graph, out]);
        "set_input" (context, index, tensor) => Ask::SetInput([context, index, tensor]);
        "compute" (context) => Ask::Compute(context);
        "get_output" (context, index, buffer, max, out) => Ask::Output([context, index, buffer, max, out]);
    }
    Ok(())
}

async fn answer(mut caller: Caller<'_, State>, ask: Ask) -> Result<i32> {
    let Host { attached, cancel, deadline } = Host::of(&caller)?;
    let mut host_state = host_state(&attached, &cancel, deadline).await?;
    let HostState { inference, .. } = &mut *host_state;
    let shared = crate::hostcalls::builtins::shared(&caller);
    let mut memory = crate::hostcalls::builtins::memory(&mut caller, shared.as_ref())?;
    let work = inference.answer(ask, &cancel, &mut memory);
    let answer = cancel.unless_cancelled(deadline, work).await.map_err(ended)?;
    Ok(answer.err().map_or(0, |refusal| refusal as i32))
}

impl Inference {
    async fn answer(
        &mut self,
        ask: Ask,
        cancel: &CancelHandle,
        memory: &mut GuestMemory<'_>,
    ) -> Result<(), Refusal> {
        match ask {
            Ask::Load => Err(Refusal::UnsupportedOperation),
            Ask::LoadByName([name, len, out]) => {
                if len as u32 > NAME_BYTES_MAX {
                    return Err(Refusal::NotFound);
                }
                let name = GuestPtr::<str>::new((name as u32, len as u32));
                let name = memory.as_cow_str(name).map_err(|_| Refusal::MissingMemory)?;
                let graph = self.load(name.into_owned())?;
                put(memory, out, graph)
            }
            Ask::Begin([graph, out]) => {
                let context = self.begin(graph as u32)?;
                put(memory, out, context)
            }
            Ask::SetInput([context, index, tensor]) => {
                self.set_input(context as u32, index as u32, tensor as u32, memory)
            }
            Ask::Compute(context) => self.compute(context as u32, cancel).await,
            Ask::Output([context, index, buffer, max, out]) => {
                let bytes = self.output(context as u32, index as u32)?;
                if bytes.len() > max as u32 as usize {
                    return Err(Refusal::TooLarge);
                }
                let to = GuestPtr::<[u8]>::new((buffer as u32, bytes.len() as u32));
                memory.copy_from_slice(bytes, to).map_err(|_| Refusal::MissingMemory)?;
                put(memory, out, bytes.len() as u32)
            }
        }
    }
}

fn put(memory: &mut GuestMemory<'_>, at: i32, value: u32) -> Result<(), Refusal> {
    memory.write(GuestPtr::new(at as u32), value).map_err(|_| Refusal::MissingMemory)
}
