"""Mistakes: each has to stay one line on standard error, and status 2."""

RUNS = (
    *("strategy=hybird", "task=digit", "trainer.devces=2", "devices=2", "optimizer.lrr=1"),
    *("strategy=backup strategy.policy.k=3 trainer.devices=2", "strategy=switch"),
    *("strategy=ssp strategy.policy.lead=-1", "strategy.policy=sometimes", "trainer.devices=0"),
    *("optimizer.lr=fast", "model._target_=nowhere.Module", "model._target_=torch.nn.Linear"),
    *("ckpt=nowhere.ckpt", "test_only=true", "resume=nowhere", "resume=auto ckpt=last"),
    *("strategy.workers_per_device=0", "trainer.precision=33", "faults=[{kind:fly}]"),
    *("strategy.start_method=teleport", "strategy.on_failure=hope", "strategy.iterable=maybe"),
    *("strategy.correction=hope", "strategy=hogwild strategy.correction=dc_asgd"),
    *("strategy=hogwild strategy.transport_dtype=bf16", "-m seed=1,2 strategy=hybird"),
    *("trainer.devices", "--frobnicate", "seed=lucky", "data.batch_size=0"),
)
OTHERS = (
    *(
        "hybridtrain replay",
        "hybridtrain replay run=nowhere",
        "hybridtrain replay runn=x",
    ),
    *("hybridtrain simulate strategy=hybird", "hybridtrain simulate workers=0"),
    *("hybridtrain simulate compute=magic", "hybridtrain simulate correction=dc_asgd"),
    *("hybridtrain compare", "hybridtrain compare nowhere"),
    *(
        "hybridtrain transcribe",
        "hybridtrain transcribe ckpt=nowhere a.wav",
    ),
    "hybridtrain.tasks.speech.lm text=nowhere out=x.arpa",
)
