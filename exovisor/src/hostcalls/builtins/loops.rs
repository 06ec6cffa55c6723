//! The loops of Khronos' intrinsic tier: a function of the program for each element of an array.
//!
//! The program names its function by its place in the table it exports. Here the elements are
//! taken one after the other; a program that wants them in parallel starts threads.

use crate::hostcalls::state::State;
use crate::imports::ENV;
use std::future::poll_fn;
use std::task::Poll;
use wasmtime::{Caller, Extern, Func, Linker, Result, Trap, bail, format_err};

/// Names of the loops that fold: the accumulator comes first.
const FOLDS: [&str; 3] = ["REDUCTION", "CILK_REDUCE_T_TO_R", "CILK_REDUCE_R_TO_R"];

/// An array in the program's memory.
#[derive(Clone, Copy)]
struct Elements {
    start: i32,
    count: i32,
    bytes: i32,
}

impl Elements {
    /// The address of each, as the program counts.
    fn addresses(self) -> impl Iterator<Item = i32> {
        let address =
            move |index: u32| self.start.wrapping_add(index.wrapping_mul(self.bytes as u32) as i32);
        (0..self.count as u32).map(address)
    }
}

pub(super) fn link(linker: &mut Linker<State>) -> Result<()> {
    linker.func_wrap_async(
        ENV,
        "MAP",
        |mut caller: Caller<'_, State>, (body, start, count, bytes): (i32, i32, i32, i32)| {
            Box::new(async move {
                let body = enter(&mut caller, body)?;
                let result = map(&mut caller, &body, Elements { start, count, bytes }).await;
                caller.data_mut().inside = false;
                result
            })
        },
    )?;
    for name in FOLDS {
        linker.func_wrap_async(
            ENV,
            name,
            |mut caller: Caller<'_, State>,
             (body, start, count, bytes, into): (i32, i32, i32, i32, i32)| {
                Box::new(async move {
                    let body = enter(&mut caller, body)?;
                    let elements = Elements { start, count, bytes };
                    let result = fold(&mut caller, &body, elements, into).await;
                    caller.data_mut().inside = false;
                    result
                })
            },
        )?;
    }
    Ok(())
}

async fn map(caller: &mut Caller<'_, State>, body: &Func, elements: Elements) -> Result<()> {
    let body = body.typed::<(i32,), ()>(&mut *caller)?;
    for (turn, element) in elements.addresses().enumerate() {
        between(caller.data().cancel.is_over(), turn).await?;
        body.call_async(&mut *caller, (element,)).await?;
    }
    Ok(())
}

async fn fold(
    caller: &mut Caller<'_, State>,
    body: &Func,
    elements: Elements,
    into: i32,
) -> Result<()> {
    let body = body.typed::<(i32, i32), ()>(&mut *caller)?;
    for (turn, element) in elements.addresses().enumerate() {
        between(caller.data().cancel.is_over(), turn).await?;
        body.call_async(&mut *caller, (into, element)).await?;
    }
    Ok(())
}

/// Elements after which a loop lets others have the worker.
const YIELD_TURNS: usize = 256;

/// Ends a loop whose call is over, and lets others have the worker from time to time: the function
/// may be the host's, and then no code of the program runs that could be preempted.
async fn between(is_over: bool, turn: usize) -> Result<()> {
    if is_over {
        bail!("the call is over");
    }
    if turn % YIELD_TURNS == YIELD_TURNS - 1 {
        let mut has_yielded = false;
        poll_fn(|context| match std::mem::replace(&mut has_yielded, true) {
            true => Poll::Ready(()),
            false => {
                context.waker().wake_by_ref();
                Poll::Pending
            }
        })
        .await;
    }
    Ok(())
}

/// The function at `index` of the exported table. Each call back into the program takes a stack,
/// so a loop within a loop is refused.
fn enter(caller: &mut Caller<'_, State>, index: i32) -> Result<Func> {
    if std::mem::replace(&mut caller.data_mut().inside, true) {
        bail!("a loop of the host is called from within one");
    }
    let Some(Extern::Table(table)) = caller.get_export("__indirect_function_table") else {
        bail!("the module exports no table named `__indirect_function_table`");
    };
    let element = table.get(&mut *caller, u64::from(index as u32)).ok_or(Trap::TableOutOfBounds)?;
    let function = element.as_func().flatten().copied();
    function.ok_or_else(|| format_err!("there is no function at {index} of the table"))
}
