//! Runs the example of an asynchronous program.

#[path = "../examples/async_completions.rs"]
mod example;

/// EVT-05
#[test]
fn asynchronous_task_sleeps_on_the_channel_of_its_queue() {
    example::main().expect("the example works");
}
