# make demo    the experiment in small, on what the repository ships
# make test    the tests; both build .venv when it is missing or out of date
# make lint    style and likely mistakes
# make panel   the page of the interpretability panel, after changes in panel/; needs Node 20.19
#              or later, which nothing else does

PYTHON ?= python3
BIN := .venv/bin
DEMO := demo_output
AGENT := pretrained/coinrun_easy/model.pth
SIMULATOR := pretrained/coinrun_easy_simulator/model.pt
# What the scripts that work with the simulator have in common.
SIMULATED := --agent_file $(AGENT) --interpreting_params_name demo --data_dir $(DEMO)/rollouts/data
ANALYSED := --interpreting_params_name demo --data_dir $(DEMO)/rollouts/data --num_episodes 20 --num_generated_samples 8 --save_dir $(DEMO)/analysis

.PHONY: demo test lint benchmark panel clean

.venv/installed: requirements.txt setup.py
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v <= (3, 12) else "This project needs Python 3.10, 3.11 or 3.12 (Procgen has no build for %d.%d); try for example: make PYTHON=python3.11 $(MAKECMDGOALS)" % v)'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

demo: .venv/installed
	rm -rf $(DEMO)
	$(BIN)/python train.py --exp_name demo --param_name demo --num_timesteps 40960 --val_interval 2 --seed 0 --logdir $(DEMO)/logs
	$(BIN)/python plot_training_csv.py --datapath $(DEMO)/logs/procgen/coinrun/demo
	$(BIN)/python evaluate.py --model_file $(AGENT) --num_episodes 200 --output $(DEMO)/evaluation.json
	$(BIN)/python render.py --model_file $(AGENT) --num_eps 3 --vid_dir $(DEMO)/videos
	$(BIN)/python record.py --model_file $(AGENT) --num_episodes 20 --logdir $(DEMO)/rollouts
	$(BIN)/python train_gen_model.py $(SIMULATED) --model_file $(SIMULATOR) --max_batches 40 --log_dir_base $(DEMO) --gen_mod_exp_name demo
	$(BIN)/python plot_training_csv.py --datapath $(DEMO)/results/demo
	$(BIN)/python record_gen_samples.py $(SIMULATED) --model_file $(SIMULATOR) --num_samples 8 --data_save_dir $(DEMO)/samples
	$(BIN)/python record_gen_samples.py $(SIMULATED) --model_file $(SIMULATOR) --num_samples 8 --data_save_dir $(DEMO)/samples --recording_rand_init
	$(BIN)/python record_gen_samples.py $(SIMULATED) --model_file $(SIMULATOR) --num_samples 2 --data_save_dir $(DEMO)/samples --manual_action pattern
	$(BIN)/python loss_over_time_experiment.py $(SIMULATED) --model_file $(SIMULATOR) --output_dir $(DEMO)/loss_over_time
	$(BIN)/python hidden_analysis_precompute.py $(ANALYSED) --generated_data_dir $(DEMO)/samples
	$(BIN)/python hidden_analysis_plotting.py $(ANALYSED)
	$(BIN)/python saliency_experiments.py $(SIMULATED) --model_file $(SIMULATOR) --samples_dir $(DEMO)/samples/informed_init --sample_ids 0 to 4 --difference_demo_dir $(DEMO)/analysis/demo_with_without_env_grads --precomputed_analysis_data_path $(DEMO)/analysis/hx_analysis_precomp --num_episodes 20
	@echo "Everything above is in $(DEMO)/:"
	@cd $(DEMO) && find . \( -path ./analysis -o -path ./samples -o -name data \) -prune -print -o \( -name '*.png' -o -name 'model_*.pt*' -o -name '*.mp4' -o -name evaluation.json \) -print | sort

test: .venv/installed
	$(BIN)/python -m pytest tests

lint: .venv/installed
	$(BIN)/ruff check .

benchmark: .venv/installed
	$(BIN)/python -m benchmarks.agent
	$(BIN)/python -m benchmarks.simulator
	$(BIN)/python -m benchmarks.saliency
	$(BIN)/python -m benchmarks.analysis

panel:
	cd panel && npm ci --no-audit --no-fund && npm run build

clean:
	rm -rf .venv $(DEMO)
