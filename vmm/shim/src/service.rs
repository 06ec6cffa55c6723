//! The task service: requests of containerd's, and their answers. Version 2 and 3 differ in the name
//! alone.
//!
//! What a shim does is in [`crate::shim`]; here is what the messages say of it.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use containerd_shim_protos::Task;
use containerd_shim_protos::api;
use containerd_shim_protos::api::{
    CheckpointTaskRequest, CloseIORequest, ConnectRequest, ConnectResponse, CreateTaskRequest,
    CreateTaskResponse, DeleteRequest, DeleteResponse, Empty, ExecProcessRequest, KillRequest,
    PauseRequest, PidsRequest, PidsResponse, ProcessInfo, ResizePtyRequest, ResumeRequest,
    ShutdownRequest, StartRequest, StartResponse, StateRequest, StateResponse, StatsRequest,
    StatsResponse, Status, UpdateTaskRequest, WaitRequest, WaitResponse,
};
use containerd_shim_protos::events::task::{
    TaskExecAdded, TaskExecStarted, TaskPaused, TaskResumed,
};
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::protobuf::{EnumOrUnknown, MessageField};
use containerd_shim_protos::ttrpc::{self, TtrpcContext};
use exocell_cell::agent::{ContainerUsage, Exec, TtySize, client};
use exocell_cell::plan::TTY_SIZE_DEFAULT;

use crate::config::Config;
use crate::error::{Result, ShimError};
use crate::events::timestamp;
use crate::process::{Ended, Process, Program, Stage};
use crate::shim::{Container, Shim};
use crate::stdio::Stdio;
use crate::{metrics, resources, spec};

/// How long a guest may take to say what programs use, and to limit them.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// The service of one shim.
pub struct Service {
    shim: Arc<Shim>,
}

impl Service {
    pub fn new(shim: Arc<Shim>) -> Self {
        Self { shim }
    }

    fn process(&self, id: &str, exec_id: &str) -> Result<Arc<Process>> {
        self.shim.find(id)?.process(exec_id)
    }

    fn state_of(&self, request: &StateRequest) -> Result<StateResponse> {
        let container = self.shim.find(&request.id)?;
        let process = container.process(&request.exec_id)?;
        let status = match process.stage() {
            Stage::Created | Stage::Starting => Status::CREATED,
            Stage::Stopped => Status::STOPPED,
            Stage::Running if container.is_paused.load(Ordering::Relaxed) => Status::PAUSED,
            Stage::Running => Status::RUNNING,
        };
        let ended = process.ended();
        let Stdio { stdin, stdout, stderr, terminal } = process.stdio.clone();
        Ok(StateResponse {
            id: request.id.clone(),
            bundle: container.bundle.display().to_string(),
            pid: pid_of(&container, &process),
            status: EnumOrUnknown::new(status),
            stdin,
            stdout,
            stderr,
            terminal,
            exit_status: ended.map_or(0, |ended| ended.code),
            exited_at: exited_at(ended),
            exec_id: request.exec_id.clone(),
            ..StateResponse::default()
        })
    }

    fn exec_added(&self, request: ExecProcessRequest) -> Result<()> {
        let container = self.shim.find(&request.id)?;
        container.check_running()?;
        // What is wrong with it is told now, not when it starts.
        let stdio = Stdio {
            stdin: request.stdin.clone(),
            stdout: request.stdout.clone(),
            stderr: request.stderr.clone(),
            terminal: request.terminal,
        };
        let program = exec(&request)?;
        {
            let mut execs = container.execs.lock().unwrap_or_else(PoisonError::into_inner);
            if execs.contains_key(&request.exec_id) || request.exec_id.is_empty() {
                return Err(ShimError::exists(format!("exec {} exists", request.exec_id)));
            }
            let process = Process::of_exec(&request.exec_id, stdio, program);
            execs.insert(request.exec_id.clone(), Arc::new(process));
        }
        self.shim.events.send(&TaskExecAdded {
            container_id: request.id,
            exec_id: request.exec_id,
            ..TaskExecAdded::default()
        });
        Ok(())
    }

    fn exec_started(&self, id: &str, exec_id: &str) -> Result<u32> {
        let container = self.shim.find(id)?;
        let process = container.process(exec_id)?;
        container.check_running()?;
        if container.is_paused.load(Ordering::Relaxed) {
            return Err(ShimError::state(format!("container {id} is paused; resume it first")));
        }
        let program = process.take_program()?;
        let told = |guest_pid| {
            self.shim.events.send(&TaskExecStarted {
                container_id: id.to_owned(),
                exec_id: exec_id.to_owned(),
                pid: guest_pid,
                ..TaskExecStarted::default()
            });
        };
        let (shim, own) = (self.shim.clone(), (id.to_owned(), exec_id.to_owned()));
        let started = process.clone();
        let finished = move |ended| shim.tell_exit(&own.0, &own.1, started.guest_pid(), ended);
        let inside = container.inside()?;
        let of = (self.shim.namespace(), id);
        process.start(&inside, of, Program::Exec(Box::new(program)), told, finished)
    }

    fn usage(&self, id: &str) -> Result<ContainerUsage> {
        let container = self.shim.find(id)?;
        let stream = container.inside()?.patient(ANSWER_MAX)?;
        Ok(client::usage(&stream, &stream)?)
    }

    fn killed(&self, request: &KillRequest) -> Result<()> {
        let number = u8::try_from(request.signal).ok().filter(|number| (1..=64).contains(number));
        let number =
            number.ok_or_else(|| ShimError::invalid(format!("{} is no signal", request.signal)))?;
        if request.exec_id.is_empty() {
            return self.shim.kill(&request.id, number, request.all);
        }
        let container = self.shim.find(&request.id)?;
        let process = container.process(&request.exec_id)?;
        if let Some(ended) = process.end_before_start(number) {
            self.shim.tell_exit(&request.id, &request.exec_id, 0, ended);
            return Ok(());
        }
        let inside = container.inside()?;
        process.signal(&inside, number)
    }

    fn deleted(&self, request: &DeleteRequest) -> Result<(u32, Ended)> {
        if request.exec_id.is_empty() {
            return self.shim.delete(&request.id);
        }
        let container = self.shim.find(&request.id)?;
        let process = container.process(&request.exec_id)?;
        let ended = process.ended_or_never_started().ok_or_else(|| {
            ShimError::state(format!("exec {} runs; stop it first", request.exec_id))
        })?;
        container.execs.lock().unwrap_or_else(PoisonError::into_inner).remove(&request.exec_id);
        Ok((process.guest_pid(), ended))
    }

    fn updated(&self, request: &UpdateTaskRequest) -> Result<()> {
        let container = self.shim.find(&request.id)?;
        container.check_running()?;
        let wanted = resources::read(&request.resources.value)?;
        let memory = wanted.memory.as_ref().and_then(|memory| memory.limit);
        let most = container.cell.memory_bytes;
        if memory.and_then(|bytes| u64::try_from(bytes).ok()).is_some_and(|bytes| bytes > most) {
            return Err(ShimError::invalid(format!(
                "a memory limit above the {} MiB that its cell was made with is not possible; make \
                 the container, or its pod, anew",
                most >> 20
            )));
        }
        let stream = container.inside()?.patient(ANSWER_MAX)?;
        Ok(client::limit(&stream, &stream, &wanted)?)
    }
}

/// The program of an exec's request.
fn exec(request: &ExecProcessRequest) -> Result<Exec> {
    let text = &request.spec.value;
    let wanted = serde_json::from_slice(text)
        .map_err(|error| ShimError::invalid(format!("the process is no specification: {error}")))?;
    let process = spec::process(wanted, &Config::read()?)?;
    if process.terminal != request.terminal {
        return Err(ShimError::invalid("the process and containerd do not agree on a terminal"));
    }
    let fit = |cells: u64| u16::try_from(cells).unwrap_or(u16::MAX).max(1);
    let wanted_size =
        process.console_size.map(|size| TtySize { rows: fit(size.height), cols: fit(size.width) });
    Ok(Exec {
        args: process.args.clone(),
        env: process.env.clone(),
        cwd: process.cwd.clone(),
        tty: request.terminal.then(|| wanted_size.unwrap_or(TTY_SIZE_DEFAULT)),
        rules: Some(Box::new(process)),
        ..Exec::default()
    })
}

/// The host's pid that stands for a container, or a guest's of an exec.
fn pid_of(container: &Container, process: &Process) -> u32 {
    match process.exec_id.is_empty() {
        true => container.cell.pid,
        false => process.guest_pid(),
    }
}

fn exited_at(
    ended: Option<Ended>,
) -> MessageField<containerd_shim_protos::protobuf::well_known_types::timestamp::Timestamp> {
    MessageField::from_option(ended.map(|ended| timestamp(ended.at)))
}

type Answer<T> = ttrpc::Result<T>;

impl Task for Service {
    fn state(&self, _: &TtrpcContext, request: StateRequest) -> Answer<StateResponse> {
        Ok(self.state_of(&request)?)
    }

    fn create(&self, _: &TtrpcContext, request: CreateTaskRequest) -> Answer<CreateTaskResponse> {
        let pid = self.shim.create(&request)?;
        Ok(CreateTaskResponse { pid, ..CreateTaskResponse::default() })
    }

    fn start(&self, _: &TtrpcContext, request: StartRequest) -> Answer<StartResponse> {
        let pid = match request.exec_id.is_empty() {
            true => self.shim.start(&request.id)?,
            false => self.exec_started(&request.id, &request.exec_id)?,
        };
        Ok(StartResponse { pid, ..StartResponse::default() })
    }

    fn delete(&self, _: &TtrpcContext, request: DeleteRequest) -> Answer<DeleteResponse> {
        let (pid, ended) = self.deleted(&request)?;
        Ok(DeleteResponse {
            pid,
            exit_status: ended.code,
            exited_at: exited_at(Some(ended)),
            ..DeleteResponse::default()
        })
    }

    fn pids(&self, _: &TtrpcContext, request: PidsRequest) -> Answer<PidsResponse> {
        // Of the host, as all who ask take them: docker's engine looks them up in the host's /proc.
        let pid = self.shim.find(&request.id)?.cell.pid;
        let processes = vec![ProcessInfo { pid, ..ProcessInfo::default() }];
        Ok(PidsResponse { processes, ..PidsResponse::default() })
    }

    fn pause(&self, _: &TtrpcContext, request: PauseRequest) -> Answer<Empty> {
        self.shim.pause(&request.id, true)?;
        self.shim.events.send(&TaskPaused { container_id: request.id, ..TaskPaused::default() });
        Ok(Empty::default())
    }

    fn resume(&self, _: &TtrpcContext, request: ResumeRequest) -> Answer<Empty> {
        self.shim.pause(&request.id, false)?;
        self.shim.events.send(&TaskResumed { container_id: request.id, ..TaskResumed::default() });
        Ok(Empty::default())
    }

    fn checkpoint(&self, _: &TtrpcContext, _: CheckpointTaskRequest) -> Answer<Empty> {
        Err(ShimError::unimplemented("a cell has no checkpoints").into())
    }

    fn kill(&self, _: &TtrpcContext, request: KillRequest) -> Answer<Empty> {
        self.killed(&request)?;
        Ok(Empty::default())
    }

    fn exec(&self, _: &TtrpcContext, request: ExecProcessRequest) -> Answer<Empty> {
        self.exec_added(request)?;
        Ok(Empty::default())
    }

    fn resize_pty(&self, _: &TtrpcContext, request: ResizePtyRequest) -> Answer<Empty> {
        let process = self.process(&request.id, &request.exec_id)?;
        let fit = |cells: u32| u16::try_from(cells).unwrap_or(u16::MAX);
        let size = TtySize { rows: fit(request.height), cols: fit(request.width) };
        if size.rows > 0 && size.cols > 0 {
            process.resize(size)?;
        }
        Ok(Empty::default())
    }

    fn close_io(&self, _: &TtrpcContext, request: CloseIORequest) -> Answer<Empty> {
        let process = self.process(&request.id, &request.exec_id)?;
        if request.stdin {
            process.close_stdin();
        }
        Ok(Empty::default())
    }

    fn update(&self, _: &TtrpcContext, request: UpdateTaskRequest) -> Answer<Empty> {
        self.updated(&request)?;
        Ok(Empty::default())
    }

    fn wait(&self, _: &TtrpcContext, request: WaitRequest) -> Answer<WaitResponse> {
        let ended = self.process(&request.id, &request.exec_id)?.wait();
        Ok(WaitResponse {
            exit_status: ended.code,
            exited_at: exited_at(Some(ended)),
            ..WaitResponse::default()
        })
    }

    fn stats(&self, _: &TtrpcContext, request: StatsRequest) -> Answer<StatsResponse> {
        let stats: Any = metrics::of(&self.usage(&request.id)?)?;
        Ok(StatsResponse { stats: MessageField::some(stats), ..StatsResponse::default() })
    }

    fn connect(&self, _: &TtrpcContext, request: ConnectRequest) -> Answer<ConnectResponse> {
        let task_pid = self.shim.find(&request.id).map_or(0, |container| container.cell.pid);
        Ok(ConnectResponse { shim_pid: std::process::id(), task_pid, ..ConnectResponse::default() })
    }

    fn shutdown(&self, _: &TtrpcContext, request: ShutdownRequest) -> Answer<api::Empty> {
        self.shim.shut_down(request.now);
        Ok(Empty::default())
    }
}
